"""Short crash tests, each a program of its own since it forks daemons and collects orphans.

    python tests/soak/quick.py               kill each role's processes once at each point, in turn
    python tests/soak/quick.py FAULT         kill the daemons while syncd has a fault

Prints the outcome as JSON.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
sys.path[:0] = map(str, (HERE, SUPPORT, SUPPORT / "crash", HERE.parents[1]))

from episode import Episode  # noqa: E402
from plan import ROLES, Plan, Shot, random_commands, sweep  # noqa: E402

COMMANDS = ("run:quick", "sh", "run:slow", "run:next", "malformed", "run:tree", "stop:tree", "sh")
# Where to die with a fault, so that it shows.
SHOTS = {
    "scan_is_kept_too_late": [
        Shot("controller:before:commit@faults.scan_is_kept_too_late.keep", times)
        for times in (2, 1, 1)
    ],
    "pack_is_read_before_it_is_applied": [
        Shot("controller:after:commit@syncd.delivery.peers.Peers.move_on", times)
        for times in (2, 2)
    ],
    "cursor_of_a_log_is_not_kept": [
        Shot("worker:after:upload-pack@*", 9),
        Shot("controller:after:commit@syncd.delivery.link.Link._apply", 9),
    ],
    "files_are_written_in_place": [Shot("worker:half:*", 9)],
}


def _plan(fault: str) -> Plan:
    if fault:
        return Plan(lanes=[SHOTS[fault]], commands=COMMANDS * 2, patience=5.0, shot_seconds=10.0)
    return sweep(ROLES, [*COMMANDS, *random_commands(random.Random(1), 24)])


def main(argv: Sequence[str]) -> int:
    fault = argv[0] if argv else ""
    folder = Path(tempfile.mkdtemp(prefix="syncd-crash-"))
    outcome = Episode(_plan(fault), folder / "e", seed="1", fault=fault).run()
    print(json.dumps(outcome.to_json(), indent=1))
    if fault or not outcome.violations:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
