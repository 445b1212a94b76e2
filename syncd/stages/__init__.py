"""Stages as processes: what to run next, and one detached attempt of a run."""
