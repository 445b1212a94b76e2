"""Tests of trainer/pool/describe.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from trainer.pool.describe import corpus_rows, describe, describe_table, plot_shares
from trainer.pool.format import Pool
from trainer.pool.sample import sample


def shown(pool: Pool, size: int | None = None) -> str:
    console = Console(width=100)
    index = None if size is None else sample(pool, size, 1)
    with console.capture() as capture:
        console.print(describe_table(pool, index))
    return capture.get()


def test_counts_and_lengths_are_those_of_the_corpora(pool: Pool) -> None:
    rows = {row.corpus: row for row in corpus_rows(pool)}
    gestures = rows["PickupGestureWiimoteZ"]
    assert (gestures.clips, gestures.train, gestures.test) == (100, 50, 50)
    assert (gestures.classes, gestures.lengths) == (10, (29, 361))
    assert sum(row.clips for row in rows.values()) == pool.rows


@pytest.mark.parametrize("noted", [None, 3, {}, {"ACSF1": None}, {"ACSF1": [1]}, {"ACSF1": "ab"}])
def test_lengths_that_a_manifest_does_not_tell_are_left_out(pool: Pool, noted: object) -> None:
    manifest = replace(pool.manifest, preprocessing={"original_lengths": noted})
    rows = {row.corpus: row for row in corpus_rows(Pool(pool.folder, manifest))}
    assert rows["ACSF1"].lengths is None


def test_the_description_is_json_with_the_samples_bias_and_the_head_slices(pool: Pool) -> None:
    described = json.loads(json.dumps(describe(pool, sample(pool, 500, 1))))
    assert described["content_hash"] == pool.content_hash
    assert described["sample"]["bias"]["passed"] is True
    assert described["sample"]["head_bias"]["passed"] is False
    assert sum(row["sampled"] for row in described["corpora"]) == 500
    assert sum(row["head"] for row in described["corpora"]) == 500


def test_the_table_names_every_corpus_and_its_share(pool: Pool) -> None:
    cells = [[cell.strip() for cell in line.split("│")] for line in shown(pool).splitlines()]
    assert ["", "ItalyPowerDemand", "1096", "48.7%", "67", "1029", "2", "24", ""] in cells
    assert "head slice" in shown(pool, 500)
    assert "…" not in shown(pool) + shown(pool, 500)


def test_the_plot_is_a_png(pool: Pool, tmp_path: Path) -> None:
    plot_shares(pool, tmp_path / "shares.png", sample(pool, 500, 1))
    with Image.open(tmp_path / "shares.png") as image:
        assert image.format == "PNG"
        assert image.width > 500
    assert [path.name for path in tmp_path.iterdir()] == ["shares.png"]
