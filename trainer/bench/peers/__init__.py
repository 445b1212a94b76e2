"""The other loaders, a module each, every one configured as its manual says is best for this work.

Each module's docstring names the pages of the manual. Where a peer takes row numbers it gets the
shared plan; where it only iterates, batches are cut from its rows as they come.
"""

from __future__ import annotations

from trainer.bench.contestant import Peer
from trainer.bench.peers import datasets, fed, grain, litdata, mosaicml, spdl, webdataset

PEERS: tuple[Peer, ...] = (
    datasets.PEER,
    datasets.STATEFUL,
    spdl.PEER,
    grain.PEER,
    mosaicml.PEER,
    litdata.PEER,
    webdataset.PEER,
    *fed.PEERS,
)
