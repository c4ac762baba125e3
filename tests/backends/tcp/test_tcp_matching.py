"""Which message goes to which receive: a model, without a socket."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.backends.messaging.signature import FIRST, Signer
from rankscope.backends.messaging.transport import ANY_SOURCE
from rankscope.backends.tcp.matching import Arrival, Matching, Request

SOURCES = st.integers(0, 2)
TAGS = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("message"), SOURCES, TAGS),
        st.tuples(st.just("receive"), st.sampled_from([ANY_SOURCE, 0, 1, 2]), TAGS),
    ),
    max_size=30,
)


def receive(source: int, tag: int) -> Request:
    return Request(np.zeros(1, np.uint8), None, source, tag)


def message(source: int, tag: int) -> Arrival:
    return Arrival(source, tag, 1, None)


@given(STEPS)
def test_messages_and_receives_match_in_order(
    steps: list[tuple[str, int, int]],
) -> None:
    matching = Matching()
    waiting: list[tuple[int, int, Request]] = []
    early: list[tuple[int, int, Arrival]] = []
    for kind, source, tag in steps:
        if kind == "message":
            fits = [
                one
                for one in waiting
                if one[0] in (source, ANY_SOURCE) and one[1] == tag
            ]
            request = matching.match(source, tag)
            assert request is (fits[0][2] if fits else None)
            if fits:
                waiting.remove(fits[0])
            else:
                arrival = message(source, tag)
                matching.keep(arrival)
                early.append((source, tag, arrival))
        else:
            found = [
                one for one in early if source in (one[0], ANY_SOURCE) and one[1] == tag
            ]
            request = receive(source, tag)
            assert matching.post(request) is (found[0][2] if found else None)
            if found:
                early.remove(found[0])
            else:
                waiting.append((source, tag, request))


def test_the_signature_above_a_tag_does_not_have_to_match() -> None:
    matching = Matching()
    request = receive(0, 1 << 16 | 5)
    assert matching.post(request) is None
    assert matching.match(0, 2 << 16 | 6) is None
    assert matching.match(0, 2 << 16 | 5) is request


def test_a_lost_rank_ends_what_only_it_could_bring() -> None:
    matching = Matching()
    from_0, from_1, from_any = receive(0, 5), receive(1, 5), receive(ANY_SOURCE, 6)
    for request in (from_0, from_1, from_any):
        assert matching.post(request) is None
    whole, part = message(0, 7), message(0, 7)
    whole.whole = True
    matching.keep(whole)
    matching.keep(part)
    assert [*matching.lose(0, last=False)] == [from_0]
    # What had come as a whole can still be received.
    assert matching.post(receive(0, 7)) is whole
    assert matching.post(receive(0, 7)) is None
    assert {*matching.lose(1, last=True)} == {from_1, from_any}


def test_messages_that_no_receive_will_take_are_told() -> None:
    matching, signer = Matching(), Signer()
    first, second, third = (signer.sign(None) | FIRST for _ in range(3))
    assert matching.unread(first) is None
    # Of a rank that is ahead, and of a user, who may ask for it later.
    for tag in (third, 5):
        matching.keep(message(0, tag))
    assert matching.unread(second) is None
    left = message(1, second)
    matching.keep(left)
    assert matching.unread(first) is None
    assert matching.unread(second) is left
    assert matching.post(receive(1, second)) is left
    assert matching.unread(second) is None
    assert matching.unread(third) is not None
    assert matching.post(receive(ANY_SOURCE, 5)) is not None
