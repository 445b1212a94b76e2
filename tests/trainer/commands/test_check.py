import json

from trainer.cli import main

SHIP = "artifacts/export.0002.0000/export.0002.0000.ship"


def test_a_good_bundle_is_shown(finished_runs, capsys):
    assert main(["check", str(finished_runs / SHIP)]) == 0
    shown = capsys.readouterr().out
    assert "export.0002.0000" in shown
    assert "pretrain.0001.0000" in shown
    assert main(["check", str(finished_runs / SHIP), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "export.0002.0000"


def test_a_bundle_cut_short_ends_with_the_exit_code_of_bad_data(finished_runs, tmp_path, capsys):
    path = tmp_path / "cut.ship"
    path.write_bytes((finished_runs / SHIP).read_bytes()[:-10])
    assert main(["check", str(path)]) == 4
    told = capsys.readouterr().err
    assert told.startswith(f"trainer: error: read the ship bundle: {path}: cut short")
    assert "export the run anew" in told
