"""The ranks of the contenders, which run blocks of ops on request."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Absolute names: ranks are given `serve` by the file of its module.
from bench.table import Sample, size_name
from bench.worker import serve
from rankscope.backends.conformance import mpi_ranks, ranks

__all__ = ["Ranks", "costs_in_turns", "in_turns", "started"]

#: Seconds for the start of ranks, and for a block.
START, BLOCK = 60.0, 120.0
_FOREVER = 1e6
#: What a rank that died, raised or does not answer is told by.
FAILURES = (ranks.RankFailure, OSError)


class Ranks:
    """`size` processes that run one contender; idle ones block on their input."""

    def __init__(self, name: str, size: int, python: str) -> None:
        self.name, self.size = name, size
        if name in ("mpi", "bare-mpi"):
            # A rank pins itself.
            options = ("--bind-to", "none") if mpi_ranks.is_open_mpi() else ()
            self._ranks: ranks.Ranks = mpi_ranks.MPIRanks(
                size, serve, name, timeout=_FOREVER, options=options
            )
        else:
            self._ranks = ranks.Ranks(
                size, serve, name, timeout=_FOREVER, python=python
            )
        try:
            self._answers(START)
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Send `request` to every rank; return their answers, by rank."""
        for rank in range(self.size):
            self._ranks.tell(rank, request)
        return self._answers(BLOCK)

    def costs(self, iterations: int, variant: str) -> tuple[list[float], float]:
        """Run `iterations` ops; return the seconds of each, and of CPU of one.

        Both are the mean over the ranks. The CPU is that of the rank's process and its
        children, all threads.
        """
        answers = self.ask(iterations=iterations, variant=variant)
        each = zip(*(answer["times"] for answer in answers), strict=True)
        times = [sum(of) / len(of) / 1e9 for of in each]
        used = sum(answer["cpu"] for answer in answers) / len(answers) / 1e9
        return times, used / iterations

    def prepare(self, nbytes: int, variant: str) -> None:
        """Allocate arrays of `nbytes` on every rank, and check the result of one op."""
        self.ask(nbytes=nbytes, variant=variant)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        return [self._ranks.next_report(rank, timeout) for rank in range(self.size)]

    def close(self) -> None:
        self._ranks.__exit__()


def _why(error: Exception) -> str:
    """Return the first line of an error of ranks, and the last one of their output."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    more = [one for one in rest if one.strip() and not one.startswith("--- rank")]
    return f"{first}: {more[-1].strip()}" if more else first


@contextlib.contextmanager
def started(
    pythons: Mapping[str, str], size: int, left_out: Callable[[str], None]
) -> Iterator[dict[str, Ranks]]:
    """Have `size` ranks of each contender, by its Python, within the block.

    `left_out` is called with the reason where one does not start.
    """
    contenders: dict[str, Ranks] = {}
    try:
        for name, python in pythons.items():
            try:
                contenders[name] = Ranks(name, size, python)
            except FAILURES as error:
                left_out(f"{size} ranks: {name}: {_why(error)}")
        yield contenders
    finally:
        for one in contenders.values():
            one.close()


#: Contender and variant → what was measured of them.
Samples = dict[tuple[str, str], Sample]


def costs_in_turns(
    contenders: dict[str, Ranks],
    nbytes: int,
    iterations: int,
    rounds: int,
    left_out: Callable[[str], None],
    variants: Sequence[str],
) -> tuple[Samples, Samples]:
    """Return the times, and the CPU of an op, of each contender and variant.

    Within a round each runs one block, in turn, and the order rotates from round to
    round, so that a disturbance affects all. A contender that fails is closed and taken
    away: `left_out` is called with the reason.
    """
    times: Samples = {}
    cpu: Samples = {}

    def attempt(name: str, variant: str, step: Callable[[Ranks, str], None]) -> None:
        one = contenders.get(name)
        if one is None:
            return
        try:
            step(one, variant)
        except FAILURES as error:
            left_out(
                f"{one.size} ranks, from {size_name(nbytes)} on: {name}: {_why(error)}"
            )
            contenders.pop(name).close()
            for samples, which in itertools.product((times, cpu), variants):
                samples.pop((name, which), None)

    def prepare(one: Ranks, variant: str) -> None:
        one.prepare(nbytes, variant)
        one.costs(min(iterations, 20), variant)
        times[one.name, variant], cpu[one.name, variant] = Sample([]), Sample([])

    def block(one: Ranks, variant: str) -> None:
        took, used = one.costs(iterations, variant)
        times[one.name, variant].rounds.append(took)
        cpu[one.name, variant].rounds.append([used])

    order = [(name, variant) for name in contenders for variant in variants]
    for name, variant in order:
        attempt(name, variant, prepare)
    for number in range(rounds):
        turn = number % len(order) if order else 0
        for name, variant in order[turn:] + order[:turn]:
            attempt(name, variant, block)
    return times, cpu


def in_turns(
    contenders: dict[str, Ranks],
    nbytes: int,
    iterations: int,
    rounds: int,
    left_out: Callable[[str], None],
    variant: str = "",
) -> dict[str, Sample]:
    """Return the times of each contender; see `costs_in_turns`."""
    times, _ = costs_in_turns(
        contenders, nbytes, iterations, rounds, left_out, [variant]
    )
    return {name: sample for (name, _), sample in times.items()}
