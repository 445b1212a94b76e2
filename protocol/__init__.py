"""What both ends of a shared folder, and the trainer, agree on. Standard library only.

`docs/protocol.md` is the normative text; each module here is one of its sections.
"""
