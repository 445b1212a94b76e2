"""Longer runs of the parsers' targets, guided by coverage: needs `pip install '.[fuzz]'`.

    python tests/fuzz/fuzz.py                     every target in turn, for 60 seconds each
    python tests/fuzz/fuzz.py queue --seconds 600 one of them
    python tests/fuzz/fuzz.py queue --input FILE  one input again, which a run has left

Prints executions per target; the exit code is 1 when one failed, and its input is kept in the
current folder. Memory and time of each input are bounded: 2 GiB, 25 seconds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
LIMITS = ["-rss_limit_mb=2048", "-timeout=25", "-max_len=8192"]


def fuzz(name: str, arguments: list[str]) -> None:
    """Run one target in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["protocol", "syncd.config", "syncd.delivery.receipt"]):
        from parsers import TARGETS, write_seeds

    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="syncd-fuzz-") as folder:
        write_seeds(target, Path(folder))
        atheris.Setup([sys.argv[0], *LIMITS, *arguments, folder], target.run)
        atheris.Fuzz()


def run(name: str, seconds: int) -> bool:
    """Run one target in a process of its own; print how it went, return whether it went well."""
    command = [sys.executable, __file__, name, "--here", "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    told = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    executions, took = told.groups() if told else ("?", "?")
    well = done.returncode == 0 and told is not None
    print(f"{name:<10} {executions:>10} executions in {took} s: {'ok' if well else 'FAILED'}")
    sys.stdout.flush()
    if not well:
        print(done.stderr[-4000:])
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="all")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:  # before anything is imported that is to be instrumented
        fuzz(given.target, [f"-max_total_time={given.seconds}"])
    from parsers import TARGETS

    chosen = list(TARGETS) if given.target == "all" else [given.target]
    if unknown := set(chosen) - set(TARGETS):
        parser.error(f"no target {unknown.pop()!r}; there are: {', '.join(TARGETS)}")
    if given.input:
        for name in chosen:
            TARGETS[name].run(given.input.read_bytes())
        return 0
    went = [run(name, given.seconds) for name in chosen]
    return 0 if all(went) else 1


if __name__ == "__main__":
    sys.exit(main())
