"""`python -m syncd.notebook`: what looks after the worker while a cell shows it."""

import sys

from syncd.notebook.keeper import main

sys.exit(main())
