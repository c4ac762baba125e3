"""Random programs with one fault, on real ranks: nobody else than it is blamed for."""

from __future__ import annotations

import pytest

from rankscope.engines import Cluster
from tests.engines.cluster.random_programs import (
    SETUP,
    judge,
    make_program,
    report,
    run,
    run_script,
)

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(300)]

#: Programs of many faults, ops without waiting, and ranks at different speeds.
_CELLS = (*range(12), 210, 326)
#: A reduction that differs; a rank that has left, and with it the store; a dead rank
#: for which a root waits; ranks for whom others wait and whom an error has ended.
_SCRIPTS = (3, 6, 14, 19, 20)


def test_in_cells(cluster: Cluster) -> None:
    cluster.execute(SETUP).result()
    results: dict[int, str] = {}
    for seed in _CELLS:
        program = make_program(seed)
        outcome = run(cluster, program)
        results[seed] = judge(program, outcome)
        assert results[seed] in ("right", "ended"), report(program, outcome)
    # Not each fault makes a program hang.
    assert sum(one == "right" for one in results.values()) > len(_CELLS) / 2, results


@pytest.mark.parametrize("seed", _SCRIPTS)
def test_as_scripts(seed: int) -> None:
    program = make_program(seed)
    outcome = run_script(program)
    # A busy host may end rank 0, and with it the store, before all come to the fault.
    assert judge(program, outcome) in ("right", "ended"), report(program, outcome)


def test_a_program_is_made_from_its_seed_alone() -> None:
    assert str(make_program(7)) == str(make_program(7))
    assert len({make_program(seed).fault for seed in range(200)}) == 13
