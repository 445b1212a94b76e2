"""What makes delivery exact: packs, contents, growing files, whole files, snapshots."""
