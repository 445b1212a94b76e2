"""Puts crash points into the supervisors of a crash test; does nothing in any other program.

Python imports this by itself where this folder is on PYTHONPATH, as a crash test's daemons have it.
"""

import os
import sys

if os.environ.get("CRASH_CONTROL") and "syncd.stages.supervisor" in sys.orig_argv:
    import crashpoints

    crashpoints.install(
        "supervisor", os.environ.pop("CRASH_CONTROL"), folder=os.path.abspath(sys.orig_argv[-1])
    )
    del os.environ["PYTHONPATH"]  # the stage is none of ours
