"""What is copied to which of several remotes, and in which order."""

from __future__ import annotations

import pytest

from protocol.wire import Kind, ObjectName
from syncd.delivery.mirror import missing


def name(kind: Kind, seq: int) -> ObjectName:
    return ObjectName(seq, kind, 10, f"{seq:064x}")


PACKS = [name(Kind.PACK, seq) for seq in range(1, 6)]
CHUNKS = [name(Kind.CHUNK, seq) for seq in (1, 2)]
STATE = name(Kind.STATE, 3)


@pytest.mark.parametrize(
    ("everything", "there", "chunks", "wanted"),
    [
        ([], [], [], []),
        (PACKS, PACKS, [], []),
        (PACKS, PACKS[:2], [], PACKS[2:]),
        (PACKS[::-1], [], [], PACKS),
        # Chunks before what names them; those that nothing names are not wanted.
        ([*PACKS[:1], *CHUNKS], [], CHUNKS[1:], [CHUNKS[1], PACKS[0]]),
        # A state stands for what is before it, and a newer one for an older one.
        ([*PACKS, STATE], [], [], [STATE, *PACKS[3:]]),
        ([*PACKS, STATE, name(Kind.STATE, 2)], PACKS[:3], [], [STATE, *PACKS[3:]]),
        ([*PACKS, STATE], [STATE], [], PACKS[3:]),
    ],
)
def test_what_is_missing_is_copied_in_an_order_in_which_it_can_be_read(
    everything, there, chunks, wanted
):
    assert missing(everything, set(there), set(chunks)) == wanted
