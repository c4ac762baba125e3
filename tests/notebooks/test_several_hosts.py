"""The notebook on several hosts is executed, with two where there can be two."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.engines.cluster import ssh_hosts, two_hosts
from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "10_several_hosts.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The names of the hosts of the ranks."""
    if ssh_hosts.why_not():
        return [socket.gethostname()] * 4
    return ["host-a", "host-a", "host-b", "host-b"]


@pytest.fixture(scope="module")
def outputs(
    _module_leaves_nothing: None,
    names: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """Cell id → its text."""
    if len(set(names)) == 1:
        return outputs_of(PATH, patience=1)
    (step,) = two_hosts.steps_of(
        ssh_hosts.__file__,
        tmp_path_factory.mktemp("hosts"),
        PATH,
    )
    found: dict[str, str] = step["outputs"]
    return found


def test_the_ranks_are_in_the_order_of_their_hosts(
    outputs: dict[str, str], names: list[str]
) -> None:
    assert re.findall(r"(\S+): local rank", outputs["where"]) == names
    assert f"on all hosts ({len(set(names))}): " in outputs["cost"]


def test_a_rank_that_dies_comes_back_on_its_host(
    outputs: dict[str, str], names: list[str]
) -> None:
    died = r"rank 3: EngineDied: killed by SIGKILL \(.* on " + names[3]
    assert re.search(died, outputs["dead"])
    assert "rank 3 restarted" in outputs["restart"]
    found = re.findall(r"\[\d\] +(\S+) (\d+|has nothing)", outputs["again"])
    assert found == [*zip(names, ["0", "10", "20", "has nothing"], strict=True)]


def test_the_ranks_are_found_again_and_ended(outputs: dict[str, str]) -> None:
    assert "detached from 4 ranks; they keep running" in outputs["let-go"]
    assert "4 ranks attached" in outputs["attach"]
    # What is left of each board says whether the ranks run on.
    assert "Ended: This notebook has detached" in outputs["init"]
    assert "Ended: The ranks were shut down" in outputs["attach"]
    assert outputs["still"].split() == ["[0]", "0"]
    assert "4 ranks ended" in outputs["shutdown"]
