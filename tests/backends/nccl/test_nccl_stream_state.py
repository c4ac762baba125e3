"""The state machine of an NCCL stream: no device, no thread."""

from __future__ import annotations

import itertools

import pytest

from rankscope.backends.nccl.stream_state import StreamEvent, StreamState, transition

S, E = StreamState, StreamEvent

CHANGES = {
    (S.OPEN, E.RESERVE): S.RESERVED,
    (S.OPEN, E.SHRINK): S.SHRINKING,
    (S.OPEN, E.SUSPEND): S.SUSPENDED,
    (S.OPEN, E.FAIL): S.BROKEN,
    (S.OPEN, E.CLOSE): S.CLOSED,
    (S.RESERVED, E.RELEASE): S.OPEN,
    (S.RESERVED, E.FAIL): S.BROKEN,
    (S.RESERVED, E.CLOSE): S.CLOSED,
    (S.SUSPENDED, E.RESUME): S.OPEN,
    (S.SUSPENDED, E.FAIL): S.BROKEN,
    (S.SUSPENDED, E.CLOSE): S.CLOSED,
    (S.SHRINKING, E.RELEASE): S.CLOSED,
    (S.SHRINKING, E.CLOSE): S.CLOSED,
    (S.BROKEN, E.CLOSE): S.CLOSED,
    (S.CLOSED, E.FREE): S.FREED,
}
PAIRS = list(itertools.product(S, E))
REFUSED = [(s, E.FREE) for s in S if s not in (S.CLOSED, S.FREED)]


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in PAIRS if pair not in REFUSED],
    ids=lambda one: one.value,
)
def test_what_follows(state: StreamState, event: StreamEvent) -> None:
    assert transition(state, event) is CHANGES.get((state, event), state)


@pytest.mark.parametrize(("state", "event"), REFUSED, ids=lambda one: one.value)
def test_only_a_closed_stream_is_freed(state: StreamState, event: StreamEvent) -> None:
    with pytest.raises(ValueError, match=f"{state.value} cannot be freed"):
        transition(state, event)


def test_which_states_accept_ops_and_which_let_them_succeed() -> None:
    assert {state for state in S if state.accepts} == {S.OPEN, S.RESERVED, S.BROKEN}
    healthy = {S.OPEN, S.RESERVED, S.SUSPENDED}
    assert {state for state in S if state.healthy} == healthy


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_an_end_is_final(length: int) -> None:
    """No sequence of events opens a stream again that broke or was closed."""
    for events in itertools.product([e for e in E if e is not E.FREE], repeat=length):
        state, ended = S.OPEN, False
        for event in events:
            state = transition(state, event)
            ended = ended or not state.healthy
            assert not (ended and state.healthy), events
