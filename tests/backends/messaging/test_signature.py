"""Signatures: what differs between two ranks is told, and what is alike is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.messaging.signature import (
    BITS,
    FIRST,
    KINDS,
    SHIFT,
    Difference,
    Members,
    Signer,
    differences,
    is_over,
    mismatch,
    unread,
)
from rankscope.backends.messaging.transport import LONGER, Received


def sign(
    dtype: Any = "f4", ufunc: Any = None, root: int = 0, calls: int = 1, tag: int = 9
) -> int:
    signer = Signer()
    for _ in range(calls):
        signature = signer.sign(np.dtype(dtype), ufunc, root)
    return signature | tag


def test_a_signature_leaves_the_tag_alone() -> None:
    for calls in (1, 4095, 4096, 5000):
        signed = sign("c16", np.bitwise_xor, 63, calls, tag=(1 << SHIFT) - 1)
        assert signed & (1 << SHIFT) - 1 == (1 << SHIFT) - 1
        assert signed < 1 << SHIFT + BITS


def test_calls_that_are_alike_have_no_difference() -> None:
    one, other = Signer(), Signer()
    for call in range(5000):
        root = call % 200
        dtype = np.dtype("f4" if call % 3 else "i8")
        assert one.sign(dtype, np.add, root) == other.sign(dtype, np.add, root)
    assert differences(sign(), sign()) is None
    # A barrier has no array, and some dtypes no number.
    assert Signer().sign(None) == Signer().sign(None)
    assert differences(sign("M8[s]"), sign("m8[s]")) is None


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        ({"dtype": "i4"}, {}, Difference("dtype", "int32", "float32")),
        ({"dtype": "g"}, {}, Difference("dtype", "longdouble", "float32")),
        ({"dtype": "S3"}, {}, Difference("dtype", "another dtype", "float32")),
        (
            {"ufunc": np.maximum},
            {"ufunc": np.add},
            Difference("reduce op", "MAX", "SUM"),
        ),
        ({"ufunc": np.add}, {}, Difference("reduce op", "SUM", "none")),
        ({"root": 3}, {"root": 1}, Difference("root", 3, 1)),
        ({"calls": 3}, {"calls": 5, "dtype": "i4"}, Difference("calls", -2, 0)),
        ({"calls": 4097}, {"calls": 4095}, Difference("calls", 2, 0)),
    ],
)
def test_the_first_difference_is_told(
    theirs: dict[str, Any], ours: dict[str, Any], found: Difference
) -> None:
    assert differences(sign(**theirs), sign(**ours)) == found


@pytest.mark.parametrize("calls", [1, 5000, (1 << 28) - 3])
def test_what_is_over_is_told_from_what_is_to_come(calls: int) -> None:
    signer = Signer()
    signer._number = calls
    tags = [signer.sign(None) for _ in range(6)]
    for place, ours in enumerate(tags):
        over = [is_over(theirs, ours) for theirs in tags]
        assert over == [True] * (place + 1) + [False] * (5 - place)


def test_a_transport_may_carry_less() -> None:
    signer, whole = Signer(28), Signer()
    for _ in range(5000):
        signed = signer.sign(np.dtype("f4"), np.add, 3)
        assert signed == whole.sign(np.dtype("f4"), np.add, 3) & (1 << SHIFT + 28) - 1


def test_a_message_of_an_earlier_collective_is_told_as_that_ones() -> None:
    members, signer = Members(4, (4, 7)), Signer()
    broadcast = FIRST + KINDS.index(dist.OpType.BROADCAST)
    over = [signer.sign(np.dtype("f4"), root=0) | broadcast for _ in range(3)]
    ours = signer.sign(None) | FIRST + KINDS.index(dist.OpType.BARRIER)
    received = Received(1, 5, sign(root=1, calls=2, tag=broadcast))
    said = (
        "2 collectives before: broadcast: root 4 on rank 4, 7 on rank 7; its values "
        "may be wrong"
    )
    error = mismatch(dist.OpType.BARRIER, members, ours, received, 1, over)
    assert str(error) == said
    assert str(unread(members, ours, received, over)) == said
    # Nothing but the sizes differs.
    received = Received(1, 5, over[-1])
    error = unread(members, ours, received, over)
    assert str(error).startswith(
        "the collective before: broadcast: rank 7 sent 5 bytes where 0 were expected"
    )
    # The signature of it is no longer known.
    error = unread(members, ours, received, over[:-1])
    assert str(error).startswith("rank 7 sent 5 bytes in an earlier broadcast, for")
    # It is of the collective that ends just now.
    error = unread(members, over[0], Received(1, 5, sign(root=1, tag=broadcast)), ())
    assert str(error) == "broadcast: root 4 on rank 4, 7 on rank 7"


@pytest.mark.parametrize(
    ("theirs", "nbytes", "text"),
    [
        ({}, 5, "rank 7 sent 5 bytes where 8 were expected"),
        ({}, LONGER, "rank 7 sent more than the 8 bytes that were expected"),
        # More than a size that differs, as it may be the reason.
        ({"dtype": "i4"}, 5, "dtype float32 on rank 4, int32 on rank 7"),
        ({"root": 1}, 8, "root 4 on rank 4, 7 on rank 7"),
        ({"calls": 2}, 8, "rank 7 has called 1 collective more than rank 4"),
        ({"calls": 3}, 8, "rank 7 has called 2 collectives more than rank 4"),
    ],
)
def test_ranks_are_named_by_their_global_ranks(
    theirs: dict[str, Any], nbytes: int, text: str
) -> None:
    received = Received(1, nbytes, sign(**theirs))
    error = mismatch(dist.OpType.BROADCAST, Members(4, (4, 7)), sign(), received, 8)
    assert str(error).startswith(f"broadcast: {text}")


def test_a_rank_that_has_gone_on_is_not_said_to_have_called_another_op_instead() -> (
    None
):
    members, kinds = Members(0, (4, 7)), dist.OpType
    ours = sign(root=1, tag=FIRST + KINDS.index(kinds.BROADCAST))
    barrier = FIRST + KINDS.index(kinds.BARRIER)
    why = "the ranks call them in different orders, or one with different roots"
    for calls, text in (
        (1, "has called barrier in its place: the ranks call collectives in different"),
        (2, f"is in barrier, 1 collective later: {why}"),
    ):
        received = Received(1, 1, sign(None, calls=calls, tag=barrier))
        error = mismatch(kinds.BROADCAST, members, ours, received, 8)
        assert str(error).startswith(f"broadcast: rank 7 {text}")
