"""`python -m syncd`: the command line."""

import sys

from syncd.cli import main

sys.exit(main())
