"""Arrays of an op that share memory: refused, since what is read there is not defined.

An op may write into the memory that it reads in one case, which c10d allows, too: where
the part that this rank gives to itself is the part that it gets from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..work.op_type import Argument, OpType
from .base import Array
from .op import Op

__all__ = ["check_overlap"]

_READ = (Argument.READ, Argument.READ_LIST)
_LISTS = (Argument.READ_LIST, Argument.WRITTEN_LIST)


class _Part:
    """The bytes of an array that an op reads or writes, from `start` to `end`."""

    __slots__ = ("end", "name", "start", "written")

    def __init__(self, name: str, array: Array, written: bool) -> None:
        self.name = name
        self.written = written
        self.start = _address(array)
        length = array.size * array.dtype.itemsize if self.start else 0
        self.end = self.start + length


def _address(array: Array) -> int:
    """Return where the memory of `array` begins; 0 where that is not known."""
    if isinstance(array, np.ndarray):
        address: int = array.__array_interface__["data"][0]
        return address
    interface = getattr(array, "__cuda_array_interface__", None)
    return 0 if interface is None else int(interface["data"][0])


def check_overlap(
    ops: Sequence[Op], rank: int, size: int, where: Callable[[], str]
) -> None:
    """Raise `ValueError` where `ops`, which start at once, overlap in memory."""
    arrays = ops[0].arrays
    if len(ops) > 1:
        arrays = [array for op in ops for array in op.arrays]
    if _are_apart(arrays):
        return
    parts = [part for op in ops for part in _parts(op, rank, size)]
    parts = sorted((p for p in parts if p.end > p.start), key=lambda part: part.start)
    # Those with the furthest end so far, of all parts and of the written ones.
    last: _Part | None = None
    last_written: _Part | None = None
    for part in parts:
        other = last if part.written else last_written
        if other is not None and part.start < other.end:
            first, second = (part, other) if part.written else (other, part)
            raise ValueError(
                f"{ops[0].kind.value} in {where()}: {first.name} shares memory with "
                f"{second.name}; expected memory of its own for each array that is "
                "written"
            )
        if last is None or part.end > last.end:
            last = part
        if part.written and (last_written is None or part.end > last_written.end):
            last_written = part


def _are_apart(arrays: Sequence[Array]) -> bool:
    """Return whether no two of `arrays` share memory: the usual case, quickly."""
    if len(arrays) == 2 and type(arrays[0]) is type(arrays[1]) is np.ndarray:
        # They are contiguous, so that their bounds tell.
        return not np.may_share_memory(arrays[0], arrays[1])
    end = 0
    for start, length in sorted(
        (_address(array), array.size * array.dtype.itemsize) for array in arrays
    ):
        if start < end and length:
            return False
        end = max(end, start + length)
    return True


def _parts(op: Op, rank: int, size: int) -> list[_Part]:
    """Return what `op` reads and writes; once what it gives to itself in place."""
    read: list[_Part] = []
    written: list[_Part] = []
    for role, argument in zip(op.kind.spec.arguments or (), op.args, strict=False):
        name, found = ("input", read) if role in _READ else ("output", written)
        if role in _LISTS:
            for i, array in enumerate(argument or ()):
                found.append(_Part(f"{name} {i}", array, found is written))
        else:
            found.append(_Part(f"the {name}", argument, found is written))
    if not (read and written) or (op.kind is OpType.ALL_TO_ALL_SINGLE and size > 1):
        return read + written
    given, got = _own(read, written, rank, size), _own(written, read, rank, size)
    if given != got:
        return read + written
    if len(read) > 1:
        return read[:rank] + read[rank + 1 :] + written
    if given == (read[0].start, read[0].end):
        return written
    # The output is a slot of the input.
    read[0].written = True
    return read


def _own(
    parts: list[_Part], others: list[_Part], rank: int, size: int
) -> tuple[int, int]:
    """Return begin and end of what this rank gives to, or gets from, itself."""
    if len(parts) > 1:
        return parts[rank].start, parts[rank].end
    [part] = parts
    length = part.end - part.start
    # An array of as many slots as there are ranks.
    if len(others) == 1 and length == size * (others[0].end - others[0].start):
        slot = length // size
        return part.start + rank * slot, part.start + (rank + 1) * slot
    return part.start, part.end
