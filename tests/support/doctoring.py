"""`syncd doctor` as a script runs it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncd.cli import main

Found = Mapping[str, Sequence[Mapping[str, str]]]


def doctor(folder: Path, *arguments: str) -> tuple[int, Found]:
    """Run `syncd doctor --json`; return its exit code and its findings by check."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["doctor", "-C", str(folder), "--json", *arguments])
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(out.getvalue()):
        found.setdefault(finding["check"], []).append(finding)
    return code, found


def levels(found: Found) -> dict[str, str]:
    """The worst level of each check that is not ok."""
    return {
        check: "wrong" if any(f["level"] == "wrong" for f in findings) else "warning"
        for check, findings in found.items()
        if any(f["level"] != "ok" for f in findings)
    }
