"""Each peer that is installed yields every row once, as it is; who is not is skipped by name."""

import numpy as np
import pytest

from trainer.bench import ours
from trainer.bench.batches import check
from trainer.bench.contestant import Order, Peer
from trainer.bench.peers import PEERS
from trainer.loader import open_rows


# What a peer warns of is its own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_yields_every_row_once_and_as_it_is(work, peer):
    if missing := peer.missing():
        pytest.skip(f"{missing} is not installed")
    plan = ours.plan_batches(open_rows(work.corpus.shards))
    contestants = peer.contestants(work)
    assert contestants
    for contestant in contestants:
        batches = contestant.start(plan)
        found = [check(batch, work.corpus, who=contestant.title) for batch in batches]
        assert sorted(np.concatenate(found).tolist()) == list(range(work.corpus.rows))
        if contestant.order is Order.PLAN:
            assert all(map(np.array_equal, plan, found)), contestant.title


def test_a_peer_that_is_not_installed_says_what_it_lacks():
    peer = Peer(name="x", needs=("json", "no_such_module"), contestants=lambda work: [])
    assert peer.missing() == "no_such_module"
    assert Peer(name="x", needs=("json",), contestants=lambda work: []).missing() == ""


def test_no_two_contestants_have_one_title(work):
    found = [peer for peer in PEERS if not peer.missing()]
    titles = [each.title for peer in found for each in peer.contestants(work)]
    assert len(titles) == len(set(titles))
