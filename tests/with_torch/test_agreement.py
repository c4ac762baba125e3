"""Which step the ranks of `rejoin` go on from, and who sends the state of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rankscope.backends.torch_backend.agreement import (
    Held,
    Hook,
    LostStateError,
    choose,
)


def told(parts: Sequence[Sequence[int]], *states: dict[str, Any]) -> dict[int, Held]:
    """Return what ranks tell whose parameters are equal in each of `parts`."""
    replicas = {rank: tuple(part) for part in parts for rank in part}
    return {
        rank: Held(replicas[rank], layout=str(replicas[rank]), **state)
        for rank, state in enumerate(states)
    }


FRESH = {"is_fresh": True}
TORN = {"is_whole": False}


def steps(number: int | None, **more: Any) -> dict[str, Any]:
    return {"steps": number, **more}


ALL, PAIRS, SHARDS = [range(3)], [(0, 2), (1, 3)], [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("given", "step", "sources"),
    [
        # Of ranks with equal parameters the first one with most steps sends.
        (told(ALL, steps(4), steps(5), steps(5)), 5, [1, 1, 1]),
        (told(ALL, steps(None), steps(None), steps(None)), 0, [0, 0, 0]),
        # Neither a fresh process does, whatever it counts, nor one with parts of two.
        (told(ALL, steps(7, **FRESH), steps(4), steps(5)), 5, [2, 2, 2]),
        (told(ALL, steps(7, **TORN), steps(4), FRESH), 4, [1, 1, 1]),
        # Where all are fresh they begin.
        (told(ALL, FRESH, steps(2, **FRESH), FRESH), 2, [1, 1, 1]),
        # Each replica gets it from its own.
        (told(PAIRS, FRESH, steps(5), steps(5), steps(5)), 5, [2, 1, 2, 1]),
        # The latest that each part has.
        (told(PAIRS, steps(5), steps(4), steps(4), steps(4)), 4, [2, 1, 2, 1]),
        (told(SHARDS, steps(3), steps(3), steps(3)), 3, [0, 1, 2]),
    ],
)
def test_the_latest_step_that_is_on_living_ranks(
    given: dict[int, Held], step: int, sources: list[int]
) -> None:
    assert choose(given) == (step, dict(enumerate(sources)))


@pytest.mark.parametrize(
    ("given", "culprits", "says"),
    [
        (
            told(SHARDS, steps(3), FRESH, steps(3)),
            [1],
            "of rank 1 is lost, and no other",
        ),
        (
            told(ALL, TORN, FRESH, TORN),
            [0, 1, 2],
            "the state of ranks 0–2 is lost (ranks 0, 2 may have parts of two steps), "
            "and no other rank has it; load a checkpoint",
        ),
        (
            told(PAIRS, FRESH, steps(3), TORN, steps(3)),
            [0, 2],
            "the state of ranks 0, 2 is lost",
        ),
        (
            told(PAIRS, steps(5), steps(4), steps(5), steps(4)),
            [],
            "those of no step are on all of them (ranks 0, 2 of step 5, ranks 1, 3 of "
            "step 4); load a checkpoint",
        ),
    ],
)
def test_what_no_rank_has_is_lost(
    given: dict[int, Held], culprits: list[int], says: str
) -> None:
    with pytest.raises(LostStateError) as caught:
        choose(given)
    assert caught.value.culprits == tuple(culprits)
    assert says in str(caught.value)
    assert "load=..." in str(caught.value)


def test_a_step_that_nobody_counts_is_asked_for() -> None:
    with pytest.raises(ValueError, match="give step="):
        choose(told(SHARDS, steps(0), steps(None), steps(0)))


def test_ranks_that_say_other_things_of_the_model_are_told() -> None:
    given = told([(0, 1)], {}, {})
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in names"):
        choose({**given, 1: Held((0, 1), layout="another")})
    with pytest.raises(ValueError, match="rank 1 does not say so"):
        choose({**given, 1: Held((1,), layout="")})
    with pytest.raises(ValueError, match="rank 1 does not say so"):
        choose({0: given[0]})


def test_ranks_whose_communication_hooks_differ_are_told() -> None:
    hook = Hook("fp16", (0, 1))
    both = Held((0, 1), "", hooks=(hook, hook))
    assert choose({0: both, 1: both})[0] == 0
    with pytest.raises(ValueError, match="has the communication hooks fp16, fp16, and"):
        choose({0: both, 1: Held((0, 1), "", hooks=(hook,))})
    with pytest.raises(ValueError, match="and rank 0 has none: register_comm_hook is"):
        choose({0: Held((0, 1), ""), 1: both})
