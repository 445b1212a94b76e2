"""The notebook: one cell that makes a fresh VM a worker."""
