"""Stages joined by bounded channels: the trainer's engine, here driven synchronously.

`stage.py` says what a source and a stage are, `channel.py` is the queue between two stages, and
`pipeline.py` drives items from the source through the stages.
"""
