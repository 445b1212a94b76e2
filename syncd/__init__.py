"""The daemons at both ends of a shared folder, and their command line."""
