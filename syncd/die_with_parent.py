"""Become another program that the kernel kills when this one's parent dies. Linux only.

    python -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT ...]

A `preexec_fn` would do the same between fork and exec, where Python in a process with threads can
deadlock; this small program does it after the exec. It imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> int:
    """Set the signal, see that the parent is still there, and exec the rest of the arguments."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    if os.getppid() != parent:  # it died before the signal was set
        return 1
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
