"""rclone: the process that does every transfer, and the remotes that it reaches."""
