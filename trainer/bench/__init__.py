"""What the trainer's parts cost, measured beside what else could be used.

`corpus.py` makes the work and knows what must come out of it, `batches.py` says what a batch is
and checks one, `contestant.py` says what takes part, `race.py` times all of them in turns,
`figures.py` makes figures with goals of what was found, and `loader.py` is the benchmark of the
loader from end to end. `peers/` has the others, a module each; `ours.py` has ours.
"""
