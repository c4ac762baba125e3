"""Agreement: the ranks compare what they are about to do, before UCC does it.

UCC compares nothing: where ranks call different collectives, or with different sizes,
it ends with success and wrong data. So each collective begins with an all-gather of two
numbers of each rank: a hash of the call, which all ranks have to have in common, and a
sum of what the rank sends minus what it receives, weighted by sender and receiver,
which is zero over all ranks. In case of a mismatch the ranks exchange the text of their
calls, so that the error is the same on every rank and says who did what.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import DistBackendError
from ..messaging.algorithms import Flat
from ..messaging.connecting import Namer
from . import ucc
from .transport import Collective

__all__ = ["Agreement", "Call", "describe"]

_MASK = (1 << 64) - 1

# Bytes of a rank's text in an error; a longer one is cut.
_TEXT = 256


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Call(NamedTuple):
    """What a rank is about to do: text, and its hash."""

    text: str
    hash: int


@functools.lru_cache(maxsize=1024)
def describe(
    op: str,
    dtype: object = None,
    counts: tuple[int, ...] = (),
    root: int | None = None,
    reduction: str = "",
) -> Call:
    """Return the call of an op: what all ranks have to have in common of it."""
    text = op
    if dtype is not None:
        text += f" of {dtype}"
    if counts:
        each = " + ".join(map(str, counts))
        text += f", {each} element{'s' * (counts != (1,))}"
    if reduction:
        text += f", {reduction}"
    if root is not None:
        text += f", root {root}"
    return Call(text, _hash(text))


class Agreement:
    """The comparison of the calls of one group, on this rank.

    Collectives run one at a time, so that each can use the same memory.
    """

    def __init__(self, rank: int, size: int, name: Namer) -> None:
        self._size, self._name = size, name
        self._own, self._all = np.zeros(2, np.uint64), np.zeros((size, 2), np.uint64)
        self._own_text = np.zeros(_TEXT, np.uint8)
        self._all_texts = np.zeros((size, _TEXT), np.uint8)
        self._exchange = _all_gather(self._own, self._all)
        self._exchange_texts = _all_gather(self._own_text, self._all_texts)
        # Of an element from rank to rank: a row of what this one sends, a column.
        self._sent = [_hash(f"{rank} to {peer}") for peer in range(size)]
        self._received = [_hash(f"{peer} to {rank}") for peer in range(size)]

    def balance(self, sent: Sequence[int], received: Sequence[int]) -> int:
        """Return a number that is zero if summed over ranks whose sizes match.

        `sent` and `received` are the elements to and from each rank.
        """
        total = sum(map(int.__mul__, sent, self._sent))
        return total - sum(map(int.__mul__, received, self._received))

    def exchange(self, call: Call, balance: int) -> Collective:
        """Return the collective after which `holds` is to be asked."""
        self._own[0], self._own[1] = call.hash, balance & _MASK
        return self._exchange

    def holds(self, call: Call) -> bool:
        """Return whether all ranks make the same call, and their sizes match."""
        calls, balances = self._all.T.tolist()
        return calls.count(call.hash) == self._size and not sum(balances) & _MASK

    def exchange_texts(self, call: Call, detail: str) -> Collective:
        """Return the collective after which `verdict` is to be asked."""
        text = f"{call.text}{detail}".encode()[:_TEXT]
        self._own_text[:] = 0
        self._own_text[: len(text)] = np.frombuffer(text, np.uint8)
        return self._exchange_texts

    def verdict(self) -> DistBackendError:
        """Return the error that says what each rank was about to do."""
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(self._all_texts):
            text = row.tobytes().rstrip(b"\0").decode(errors="replace")
            ranks.setdefault(text, []).append(rank)
        calls = self._all[:, 0].tolist()
        what = (
            "the sizes that ranks send are not those that others receive"
            if len({*calls}) == 1
            else "the ranks call different collectives"
        )
        found = "; ".join(f"{self._name(who)}: {text}" for text, who in ranks.items())
        return DistBackendError(f"{what}: {found}")


def _all_gather(own: Flat, everything: Flat) -> Collective:
    constants = ucc.CONSTANTS
    arguments = ucc.Arguments(coll_type=constants["UCC_COLL_TYPE_ALLGATHER"])
    for info, array in ((arguments.src.info, own), (arguments.dst.info, everything)):
        info.buffer, info.count = array.ctypes.data, array.nbytes
        info.datatype = constants["UCC_DT_UINT8"]
    return Collective(arguments, (own, everything), writes=False)
