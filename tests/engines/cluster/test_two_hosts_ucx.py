"""``cpu:ucx`` between two hosts, over TCP: transports, settings, and a cut."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rankscope.backends import unavailable_reason
from tests.engines.cluster import two_hosts, two_hosts_ucx
from tests.environment import environment

pytestmark = [pytest.mark.processes, pytest.mark.soak]


#: Rank → the other rank of its host.
NEIGHBOUR = {0: 1, 1: 0, 2: 3, 3: 2}


@pytest.fixture(scope="module")
def seen(_module_leaves_nothing: None) -> dict[str, Any]:
    """What the program saw at each step; it runs once."""
    if reason := unavailable_reason("ucx"):
        pytest.skip(reason)
    if why := two_hosts.why_not(separate=True):
        pytest.skip(why)
    steps = two_hosts.steps_of(
        two_hosts_ucx.__file__,
        env={k: v for k, v in environment().items() if not k.startswith("UCX_")},
    )
    return {one["step"]: one for one in steps}


def connections(step: dict[str, Any], group: str) -> dict[int, dict[int, str]]:
    """Rank → the other ranks → the transports to each, by `ucx_info`."""
    return {
        int(rank): {
            int(peer): over
            for peer, over in info["connections"][
                f"group {group!r} on rank {rank}"
            ].items()
        }
        for rank, info in step["info"].items()
    }


def over_the_cable(rank: int) -> str:
    return f"tcp on cable-{'ab'[rank // 2]}"


def test_tcp_between_the_hosts_and_shared_memory_within(seen: dict[str, Any]) -> None:
    """Every rank has checked the results of the collectives itself."""
    use = seen["use"]
    assert use["hosts"] == ["host-a", "host-a", "host-b", "host-b"]
    for name in ("use", "net"):
        group = "default" if name == "use" else name
        assert connections(seen[name], group) == {
            rank: {
                peer: "sysv, cma" if peer == NEIGHBOUR[rank] else over_the_cable(rank)
                for peer in range(4)
                if peer != rank
            }
            for rank in range(4)
        }


def test_the_status_has_the_transports(seen: dict[str, Any]) -> None:
    for rank, found in enumerate(seen["use"]["transports"]):
        near = NEIGHBOUR[rank]
        far = [peer for peer in range(4) if peer not in (rank, near)]
        assert found == {"shm,cma": [near], "tcp": far}
    said = "shm+cma within each host, tcp between ranks 0–1 and 2–3"
    assert said in seen["use"]["table"]


def test_the_interface_of_gloo_is_ucx_s(seen: dict[str, Any]) -> None:
    settings = {rank: one["settings"] for rank, one in seen["use"]["info"].items()}
    here, there = ({"UCX_NET_DEVICES": f"cable-{end}"} for end in "ab")
    assert settings == {"0": here, "1": here, "2": there, "3": there}


def test_the_variables_of_ucx_hold_for_the_next_group(seen: dict[str, Any]) -> None:
    tls = seen["tls"]
    assert connections(tls, "tls") == {
        rank: {peer: over_the_cable(rank) for peer in range(4) if peer != rank}
        for rank in range(4)
    }
    for rank, info in tls["info"].items():
        assert info["settings"] == {
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": f"cable-{'ab'[int(rank) // 2]}",
        }
    # Those that were there before are as they were.
    assert connections(tls, "default") == connections(seen["use"], "default")


def test_an_interface_that_only_one_host_has_is_an_error(seen: dict[str, Any]) -> None:
    said = seen["wrong"]["said"]
    assert "Destination is unreachable (set: " in said
    assert "UCX_NET_DEVICES=cable-a" in said


def test_a_cut_ends_every_op_by_its_deadline(seen: dict[str, Any]) -> None:
    """Also on the side that the notebook cannot reach."""
    assert seen["down"]["ended"] < two_hosts.TIMEOUT + 5
    assert seen["down"]["abort"] == (
        "ranks 2–3: no answer within 2 s (on host-b); what was in flight on ranks 0–1 "
        "is aborted"
    )
    caught = seen["up"]["caught"]
    assert set(caught) == {"0", "1", "2", "3"}
    for rank, said in caught.items():
        where = rf"all_reduce #\d+ of group 'default' on rank {rank} \(cell 9 line 4\)"
        assert re.match(rf"Dist(Timeout|Aborted)Error: {where}", said), said
    # One rank of each side was first and told the other, or both were.
    for side in (("0", "1"), ("2", "3")):
        assert any("was not done 4 s after it began" in caught[rank] for rank in side)


def test_an_abort_ends_an_op_over_the_cable(seen: dict[str, Any]) -> None:
    """Afterwards the collectives are right again, after a rebuild."""
    up = seen["up"]
    assert up["aborted"] < 5
    for rank, said in up["reasons"].items():
        assert f"on rank {rank}" in said
        assert "the group was aborted: seen enough" in said
