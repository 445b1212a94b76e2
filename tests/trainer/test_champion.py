import dataclasses
import json

import pytest
from filelock import FileLock

import trainer.champion as champion_module
from protocol.errors import BusyError, DataError, RefusedError
from trainer.bundle import BASE, MODEL, Manifest, write_bundle
from trainer.champion import load_champion, promote


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def ship(tmp_path):
    """Make the bundle of export run number n."""

    def make(number):
        model = tmp_path / f"{number}.bin"
        model.write_bytes(b"weights %d" % number)
        manifest = Manifest(
            run_id=f"export.{number:04d}.7f3a",
            stage="export",
            arm="full",
            inputs={},
            preprocessing={},
            config={},
            classes=("A/1", "A/2"),
            metrics={},
            data_hash="",
            code_hash="",
        )
        return write_bundle(tmp_path / f"{number}.ship", manifest, {MODEL: model, BASE: model})

    return make


def bundles(store):
    return {path.stem for path in (store / "champion" / "bundles").iterdir()}


def crash_at(monkeypatch, name):
    def crash(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(champion_module, name, crash)


def test_a_store_without_champion_has_none(store):
    assert load_champion(store) is None


def test_the_promoted_bundle_is_the_champion_and_survives_its_source(store, ship):
    first = ship(1)
    promote(store, first, against="", now=10.0)
    first.path.unlink()
    champion = load_champion(store)
    assert champion.promotion.run_id == "export.0001.7f3a"
    assert champion.promotion.promoted == 10.0
    assert champion.bundle.read(MODEL) == b"weights 1"
    assert champion.previous is None


def test_the_one_before_is_kept_and_older_ones_are_removed(store, ship):
    ships = [ship(n) for n in (1, 2, 3)]
    for before, after in zip([None, *ships], ships, strict=False):
        promote(store, after, against=before.sha256 if before else "", now=0.0)
    champion = load_champion(store)
    assert champion.promotion.sha256 == ships[2].sha256
    assert champion.previous.sha256 == ships[1].sha256
    assert bundles(store) == {ships[1].sha256, ships[2].sha256}


def test_a_promotion_against_a_stale_champion_is_refused(store, ship):
    first, second, third = ship(1), ship(2), ship(3)
    promote(store, first, against="", now=0.0)
    promote(store, second, against=first.sha256, now=0.0)
    with pytest.raises(RefusedError, match="the champion is now"):
        promote(store, third, against=first.sha256, now=0.0)
    with pytest.raises(RefusedError, match="no champion"):
        promote(store, third, against="", now=0.0)
    assert load_champion(store).promotion.sha256 == second.sha256
    assert bundles(store) == {first.sha256, second.sha256}


def test_promoting_the_champion_again_changes_nothing(store, ship):
    first, second = ship(1), ship(2)
    promote(store, first, against="", now=1.0)
    promote(store, second, against=first.sha256, now=2.0)
    before = (store / "champion" / "current.json").read_bytes()
    promote(store, second, against=first.sha256, now=3.0)
    assert (store / "champion" / "current.json").read_bytes() == before
    assert load_champion(store).previous.sha256 == first.sha256


def test_a_crash_before_current_json_keeps_the_champion_and_can_be_repeated(
    store, ship, monkeypatch
):
    first, second = ship(1), ship(2)
    promote(store, first, against="", now=1.0)
    with monkeypatch.context() as patch:
        crash_at(patch, "publish_json")
        with pytest.raises(KeyboardInterrupt):
            promote(store, second, against=first.sha256, now=2.0)
    assert bundles(store) == {first.sha256, second.sha256}
    assert load_champion(store).promotion.sha256 == first.sha256
    promote(store, second, against=first.sha256, now=3.0)
    assert load_champion(store).promotion.sha256 == second.sha256


def test_a_bundle_left_by_a_crash_is_removed_by_the_next_promotion(store, ship, monkeypatch):
    first, second, third = ship(1), ship(2), ship(3)
    promote(store, first, against="", now=1.0)
    with monkeypatch.context() as patch:
        crash_at(patch, "publish_json")
        with pytest.raises(KeyboardInterrupt):
            promote(store, second, against=first.sha256, now=2.0)
    promote(store, third, against=first.sha256, now=3.0)
    assert bundles(store) == {first.sha256, third.sha256}


def test_a_crash_before_the_old_ones_are_removed_is_mended_by_repeating(store, ship, monkeypatch):
    ships = [ship(n) for n in (1, 2, 3)]
    promote(store, ships[0], against="", now=1.0)
    promote(store, ships[1], against=ships[0].sha256, now=2.0)
    with monkeypatch.context() as patch:
        crash_at(patch, "_remove_unnamed")
        with pytest.raises(KeyboardInterrupt):
            promote(store, ships[2], against=ships[1].sha256, now=3.0)
    assert load_champion(store).promotion.sha256 == ships[2].sha256
    promote(store, ships[2], against=ships[1].sha256, now=4.0)
    assert bundles(store) == {ships[1].sha256, ships[2].sha256}


def test_two_processes_do_not_promote_at_once(store, ship):
    first = ship(1)
    folder = store / "champion"
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"), pytest.raises(BusyError):
        promote(store, first, against="", now=0.0, lock_timeout=0.0)
    promote(store, first, against="", now=0.0)


def test_an_altered_or_missing_champion_bundle_is_an_error(store, ship):
    first = ship(1)
    promote(store, first, against="", now=0.0)
    kept = store / "champion" / "bundles" / f"{first.sha256}.ship"
    kept.write_bytes(first.path.read_bytes()[:-1])
    with pytest.raises(DataError, match="seal"):
        load_champion(store)
    kept.write_bytes(ship(2).path.read_bytes())
    with pytest.raises(DataError, match="not the promoted bundle"):
        load_champion(store)
    kept.unlink()
    with pytest.raises(DataError, match="No such file"):
        load_champion(store)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"current": None},
        {"current": {"path": "../../x.ship"}},
    ],
)
def test_a_current_json_that_is_wrong_is_an_error_that_names_it(store, ship, change):
    promote(store, ship(1), against="", now=0.0)
    path = store / "champion" / "current.json"
    value = json.loads(path.read_text())
    current = change.get("current")
    merged = {**value["current"], **current} if current else current
    path.write_text(json.dumps({**value, **change, **({"current": merged} if current else {})}))
    with pytest.raises(DataError, match=r"current\.json"):
        load_champion(store)


def test_a_bundle_that_changed_since_it_was_judged_is_not_promoted(store, ship):
    first = ship(1)
    judged = dataclasses.replace(first, sha256="0" * 64)
    with pytest.raises(DataError, match="changed since it was judged"):
        promote(store, judged, against="", now=0.0)
    assert load_champion(store) is None
