"""The deduplicator: live within the hold, no repeats, final form free of timing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.magics.output.deduplicate import Entry, Item, OutputDeduplicator

HOLD = 0.12


def line(text: str) -> Entry:
    return Entry("stdout", ("stdout", text), text)


def shown(items: Iterable[Item] | None) -> list[str]:
    """Items as ``"0,1 text"``."""
    assert items is not None
    return [f"{','.join(map(str, item.ranks))} {item.content}" for item in items]


def run(
    events: Iterable[tuple[float, int, str | None]], ranks: int, **options: object
) -> tuple[list[tuple[float, str]], OutputDeduplicator]:
    """Feed (time, rank, line) events (``None``: the rank's end); poll when due."""
    deduplicator = OutputDeduplicator(range(ranks), **options)  # type: ignore[arg-type]
    out: list[tuple[float, str]] = []

    def poll(now: float) -> None:
        out.extend((now, text) for text in shown(deduplicator.poll(now)))

    for when, rank, text in events:
        while (due := deduplicator.deadline) is not None and due <= when:
            poll(due)
        if text is None:
            deduplicator.finish(rank)
        else:
            deduplicator.feed(rank, line(text), when)
        poll(when)
    while (due := deduplicator.deadline) is not None:
        poll(due)
    return out, deduplicator


def texts(out: list[tuple[float, str]]) -> list[str]:
    return [text for _, text in out]


def test_a_line_of_all_ranks_is_shown_once_as_soon_as_the_last_has_it() -> None:
    out, _ = run([(0.00, 0, "x"), (0.01, 2, "x"), (0.05, 1, "x")], 3)
    assert out == [(0.05, "0,1,2 x")]


def test_a_line_of_one_rank_is_shown_after_the_hold() -> None:
    out, _ = run([(1.0, 1, "only me")], 3)
    assert out == [(1.0 + HOLD, "1 only me")]


def test_a_line_is_shown_at_once_when_nobody_is_left_to_repeat_it() -> None:
    out, _ = run([(0.0, 0, None), (0.1, 1, None), (0.2, 2, "last")], 3)
    assert out == [(0.2, "2 last")]


def test_the_last_rank_to_end_does_not_jump_the_queue() -> None:
    for first, last in ((0, 1), (1, 0)):
        events = [(0.0, 1, "b"), (0.0, 0, "a"), (0.01, first, None), (0.02, last, None)]
        out, _ = run(events, 2)
        assert out == [(0.02, "0 a"), (0.02, "1 b")]


def test_lines_that_differ_come_in_rank_order() -> None:
    out, _ = run([(0.02, 2, "c"), (0.03, 0, "a"), (0.05, 1, "b")], 3)
    assert texts(out) == ["0 a", "1 b", "2 c"]


def test_a_block_of_lines_of_a_rank_stays_together() -> None:
    events = [(0.0, 1, "1a"), (0.0, 1, "1b"), (0.001, 0, "0a"), (0.001, 0, "0b")]
    out, deduplicator = run(events, 2)
    assert texts(out) == shown(deduplicator.final()) == ["0 0a", "0 0b", "1 1a", "1 1b"]


def test_an_extra_line_of_one_rank_does_not_shift_the_others() -> None:
    events = [
        (0.00, 0, "head"),
        (0.00, 0, "same"),
        (0.01, 1, "same"),
        (0.02, 2, "same"),
    ]
    out, _ = run(events, 3)
    assert texts(out) == ["0 head", "0,1,2 same"]


def test_repeated_lines_are_matched_by_count() -> None:
    events = [
        *((0.0, 0, text) for text in ("tick", "tick", "tick")),
        *((0.0, 1, text) for text in ("start", "tick", "tick", "tick")),
    ]
    out, _ = run(events, 2)
    assert texts(out) == ["1 start", "0,1 tick", "0,1 tick", "0,1 tick"]


def test_ranks_that_say_the_same_in_another_order_lose_one_match_only() -> None:
    events = [(0.0, 0, "a"), (0.0, 0, "b"), (0.0, 1, "b"), (0.0, 1, "a")]
    out, deduplicator = run(events, 2)
    assert texts(out) == shown(deduplicator.final()) == ["0 a", "0,1 b", "1 a"]


def test_a_chance_match_does_not_break_up_what_all_ranks_share() -> None:
    deduplicator = OutputDeduplicator(range(4))
    for rank in range(4):
        for epoch in range(3):
            deduplicator.feed(rank, line(f"epoch {epoch}"), 0.0)
            deduplicator.feed(rank, line(f"loss {epoch * rank}"), 0.0)
        deduplicator.finish(rank)
    common = [text for text in shown(deduplicator.poll(0.0)) if "epoch" in text]
    assert common == [f"0,1,2,3 epoch {epoch}" for epoch in range(3)]


def test_a_rank_can_take_back_what_it_put_out() -> None:
    deduplicator = OutputDeduplicator(range(2))
    for rank in range(2):
        deduplicator.feed(rank, line("x"), 0.0)
        deduplicator.feed(rank, line(f"old {rank}"), 0.0)
    deduplicator.clear(1)
    deduplicator.feed(1, line("x"), 0.1)
    assert shown(deduplicator.restart()) == ["0,1 x", "0 old 0"]
    assert deduplicator.poll(9.0) == []


def test_a_late_rank_is_shown_apart_live_and_merged_in_the_final_form() -> None:
    events = [(0.0, 0, "x"), (0.0, 1, "x"), (1.0, 2, "x")]
    out, deduplicator = run(events, 3)
    assert out == [(HOLD, "0,1 x"), (1.0 + HOLD, "2 x")]
    assert shown(deduplicator.final()) == ["0,1,2 x"]


def test_the_final_form_keeps_pauses_in_order() -> None:
    events = [(0.0, 1, "b1"), (0.1, 0, "a1"), (5.0, 1, "b2"), (5.1, 0, "a2")]
    _, deduplicator = run(events, 2)
    assert shown(deduplicator.final()) == ["0 a1", "1 b1", "0 a2", "1 b2"]


def test_the_outcomes_of_all_ranks_stand_at_the_end_in_rank_order() -> None:
    deduplicator = OutputDeduplicator(range(3))
    deduplicator.feed(1, Entry("display", "p1", "plot 1"), 0.0)
    deduplicator.feed(2, line("thinking"), 1.0)
    deduplicator.feed(0, Entry("display", "p0", "plot 0"), 2.0)
    deduplicator.feed(2, Entry("display", "p2", "plot 2"), 9.0)
    assert shown(deduplicator.final()) == [
        "2 thinking",
        "0 plot 0",
        "1 plot 1",
        "2 plot 2",
    ]


def test_without_collapse_every_rank_has_its_own_line_at_once() -> None:
    out, deduplicator = run([(0.0, 1, "x"), (0.5, 0, "x")], 2, collapse=False)
    assert out == [(0.0, "1 x"), (0.5, "0 x")]
    assert shown(deduplicator.final()) == ["1 x", "0 x"]


def test_every_rank_keeps_its_content_in_a_shared_item() -> None:
    deduplicator = OutputDeduplicator(range(2))
    deduplicator.feed(1, Entry("error", "boom", "boom on 1"), 0.0)
    deduplicator.feed(0, Entry("error", "boom", "boom on 0"), 0.0)
    (item,) = deduplicator.poll(0.0)
    assert item.contents == ("boom on 0", "boom on 1")


def test_the_final_form_is_given_up_when_there_is_too_much() -> None:
    deduplicator = OutputDeduplicator([0], keep=3)
    for _ in range(4):
        deduplicator.feed(0, line("x"), 0.0)
    assert deduplicator.final() is None


def test_holding_back_costs_256_ranks_little() -> None:
    deduplicator = OutputDeduplicator(range(256))
    for rank in range(256):
        for step in range(4):
            deduplicator.feed(rank, line("same" if step % 2 else f"{rank} {step}"), 0.0)
    for rank in range(256):
        deduplicator.finish(rank)
    assert len(deduplicator.poll(0.0)) == 2 * 256 + 2


# -- properties ----------------------------------------------------------------

RANKS = 4
sequences = st.lists(
    st.lists(st.sampled_from("abcd"), max_size=6), min_size=RANKS, max_size=RANKS
)


@st.composite
def timed(draw: st.DrawFn) -> list[tuple[float, int, str | None]]:
    """Events of four ranks, each with its own lines, pauses and end."""
    events: list[tuple[float, int, str | None]] = []
    for rank, lines in enumerate(draw(sequences)):
        now = 0.0
        for text in (*lines, None):
            now += draw(st.sampled_from([0.0, 0.01, 0.07, 0.3, 2.0]))
            events.append((now, rank, text))
    order = sorted(range(len(events)), key=lambda i: (events[i][0], i))
    return [events[i] for i in order]


def of_rank(lines: Iterable[str], rank: int) -> list[str]:
    pairs = (text.split(" ", 1) for text in lines)
    return [content for ranks, content in pairs if str(rank) in ranks.split(",")]


@given(timed())
@settings(max_examples=150, deadline=None)
def test_no_line_is_lost_and_each_rank_keeps_its_order(
    events: list[tuple[float, int, str | None]],
) -> None:
    out, deduplicator = run(events, RANKS)
    for rank in range(RANKS):
        lines = [text for _, r, text in events if r == rank and text is not None]
        assert of_rank(texts(out), rank) == lines
        assert of_rank(shown(deduplicator.final()), rank) == lines


@given(timed())
@settings(max_examples=150, deadline=None)
def test_no_line_waits_longer_than_the_hold(
    events: list[tuple[float, int, str | None]],
) -> None:
    out, _ = run(events, RANKS)
    for rank in range(RANKS):
        fed = [when for when, r, text in events if r == rank and text is not None]
        seen = [when for when, text in out if of_rank([text], rank)]
        for came, left in zip(fed, seen, strict=True):
            assert left - came <= HOLD + 1e-9


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_equal_sequences_collapse_whenever_they_come(
    lines: list[str], data: st.DataObject
) -> None:
    deduplicator = OutputDeduplicator(range(RANKS))
    left = dict.fromkeys(range(RANKS), 0)
    now = 0.0
    while any(count < len(lines) for count in left.values()):
        rank = data.draw(st.sampled_from([r for r in left if left[r] < len(lines)]))
        now += data.draw(st.sampled_from([0.0, 0.05, 1.0]))
        deduplicator.feed(rank, line(lines[left[rank]]), now)
        left[rank] += 1
    assert shown(deduplicator.final()) == [f"0,1,2,3 {text}" for text in lines]


@given(sequences, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_final_form_of_a_short_cell_does_not_depend_on_who_was_first(
    lines: list[list[str]], random: object
) -> None:
    def final(order: list[int]) -> list[str]:
        deduplicator = OutputDeduplicator(range(RANKS))
        cursors = [iter(rank_lines) for rank_lines in lines]
        for rank in order:
            deduplicator.feed(rank, line(next(cursors[rank])), 0.0)
        return shown(deduplicator.final())

    turns = list(
        itertools.chain.from_iterable([r] * len(ls) for r, ls in enumerate(lines))
    )
    shuffled = list(turns)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert final(turns) == final(shuffled)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_held_back_forever(ranks: int) -> None:
    out, deduplicator = run([(0.0, 0, "x")], ranks)
    assert texts(out) == ["0 x"]
    assert deduplicator.deadline is None
