"""`trainer check`: does a ship bundle hold what it says?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from trainer.bundle import check


def command(bundle: Path, *, json: bool = False) -> None:
    """Verify every byte of a ship bundle, by itself, and show what it is.

    Parameters
    ----------
    bundle
        The .ship file.
    json
        Print its manifest as JSON.
    """
    told = check(bundle)
    if json:
        print(jsonlib.dumps(told, indent=1, ensure_ascii=False))
        return
    # A hash is of use only whole, so it is folded and not cut.
    value = Column("value", overflow="fold")
    table = Table("what", value, title=str(bundle), title_justify="left", show_header=False)
    for name in ("run_id", "arm", "size", "sha256", "data_hash", "code_hash"):
        table.add_row(name, str(told[name]))
    for stage, run_id in told["inputs"].items():
        table.add_row(f"from {stage}", run_id)
    table.add_row("classes", str(len(told["classes"])))
    for name, value in told["metrics"].items():
        table.add_row(name, f"{value:.6g}")
    Console().print(table)
