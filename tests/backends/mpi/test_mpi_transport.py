"""What the MPI transport makes of MPI's errors; MPI itself is not loaded."""

from __future__ import annotations

from types import SimpleNamespace

import rankscope as dist
from rankscope.backends.mpi.transport import MPITransport


class _Failure(Exception):
    """What mpi4py raises."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def Get_error_class(self) -> int:
        return self.kind

    def Get_error_string(self) -> str:
        return "MPI_ERR_OTHER: known error not in list"


def _transport(dead: list[int]) -> MPITransport:
    mpi = SimpleNamespace(
        Exception=_Failure,
        ERR_TRUNCATE=15,
        ERR_PROC_FAILED=75,
        BYTE=None,
        ANY_SOURCE=-2,
        Status=lambda: None,
    )
    failed = SimpleNamespace(Translate_ranks=lambda ranks, members: dead)
    comm = SimpleNamespace(Get_failed=lambda: failed, Get_group=lambda: None)
    return MPITransport(mpi, comm)


def test_a_dead_rank_that_mpi_knows_is_the_culprit() -> None:
    reason = _transport([1, 3]).explain(_Failure(75))
    assert isinstance(reason, dist.DistBackendError)
    assert str(reason) == "the process of ranks 1, 3 died"
    assert reason.culprits == (1, 3)


def test_a_death_of_which_mpi_does_not_know_the_rank() -> None:
    assert str(_transport([]).explain(_Failure(75))) == "the process of a rank died"


def test_a_message_that_is_too_long_names_the_sizes() -> None:
    reason = _transport([]).explain(_Failure(15))
    assert reason is not None
    assert "sizes differ between ranks" in str(reason)


def test_other_errors() -> None:
    transport = _transport([])
    assert transport.explain(_Failure(16)) == (
        "MPI reports MPI_ERR_OTHER: known error not in list"
    )
    assert transport.explain(ZeroDivisionError()) is None
