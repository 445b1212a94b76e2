"""`python -m trainer`: the same as the command `trainer`."""

from trainer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
