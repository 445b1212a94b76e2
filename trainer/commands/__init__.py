"""The commands of `trainer`, a module each, so that each imports only what it needs."""
