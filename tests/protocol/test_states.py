from itertools import product

import pytest

from protocol.states import State, is_legal

LEGAL = {
    (State.QUEUED, State.CLAIMED),
    (State.QUEUED, State.ENDED),
    (State.CLAIMED, State.STARTED),
    (State.CLAIMED, State.ENDED),
    (State.STARTED, State.STARTED),
    (State.STARTED, State.ENDED),
}


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_only_the_documented_transitions_are_legal(before: State, after: State):
    assert is_legal(before, after) == ((before, after) in LEGAL)
