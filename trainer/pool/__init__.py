"""The pool: every clip that there is to train on, as memory-mapped Arrow shards.

`format.py` says how it lies on disk and reads it, `build.py` makes one from real corpora,
`sample.py` draws unbiased subsets, and `describe.py` shows what is in it.
"""
