"""``hosts=``: ranks on this host and on another one, by ssh and a real sshd."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.cluster import ssh_hosts, two_hosts

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(580)]

#: Rank → host, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR.
PLACES = {
    "0": ["host-a", "0", "0", "2", two_hosts.HERE],
    "1": ["host-a", "1", "1", "2", two_hosts.HERE],
    "2": ["host-b", "2", "0", "2", two_hosts.HERE],
    "3": ["host-b", "3", "1", "2", two_hosts.HERE],
}


@pytest.fixture(scope="module")
def seen(
    _module_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program saw at each step; it runs once."""
    if why := ssh_hosts.why_not():
        pytest.skip(why)
    steps = two_hosts.steps_of(
        ssh_hosts.__file__,
        tmp_path_factory.mktemp("ssh"),
        timeout=560,
    )
    return {one["step"]: one for one in steps}


def test_ranks_are_in_the_order_of_their_hosts(seen: dict[str, Any]) -> None:
    assert seen["places"]["ranks"] == PLACES
    progress = seen["start"]["progress"]
    assert {one.partition(" (")[0] for one in progress} >= {
        "host-a: connected",
        "host-b: connected",
    }


def test_many_ranks_start_and_end_quickly(seen: dict[str, Any]) -> None:
    assert seen["many"]["sums"] == [24.0]
    assert seen["many"]["ready"] < 60
    assert seen["many"]["end"] < 30


def test_what_listens_is_what_the_table_has(seen: dict[str, Any]) -> None:
    """The controller, and the store in rank 0, at one address; on the other host sshd.

    Everything else is on loopback.
    """
    found, here = seen["listening"], two_hosts.HERE
    assert found["reached here"] == [[here, "controller"], [here, "rank 0"]]
    assert {address for address, _ in found["here"]} <= {here, "127.0.0.1"}
    assert {owner for _, owner in found["reached there"]} == {"sshd"}
    apart = [one for one in found["there"] if one[1] != "sshd"]
    assert {address for address, _ in apart} <= {"127.0.0.1"}


def test_what_listens_with_mpiexec_is_what_the_table_has(seen: dict[str, Any]) -> None:
    """Its daemons and all ranks, which have done an op, at every interface."""
    found, here = seen["mpi"]["listening"], two_hosts.HERE
    at = {"0.0.0.0", "::", here}
    for name, daemon, ranks in (
        ("here", "prterun", {"rank 0", "rank 1", "python"}),
        ("there", "prted", {"rank 2", "rank 3", "sshd"}),
    ):
        reached = found[f"reached {name}"]
        assert {address for address, _ in reached} <= at
        assert {owner for _, owner in reached} == {daemon, *ranks}
    # The controller, and the store.
    own = [owner for address, owner in found["reached here"] if address == here]
    assert own == ["python", "rank 0"]


def test_a_restart_is_on_the_own_host_of_the_rank(seen: dict[str, Any]) -> None:
    """The death is named as that of a process of this host."""
    assert seen["restart"]["reason"].startswith("rank 3 is dead: killed by SIGSEGV (")
    assert seen["restart"]["reason"].endswith("on host-b)")
    assert seen["restart"]["ranks"] == PLACES


def test_an_interrupt_ends_the_cell_and_not_the_ssh(seen: dict[str, Any]) -> None:
    assert seen["interrupt"] == {
        "step": "interrupt",
        "ended": True,
        "errors": ["KeyboardInterrupt"],
        "apart": True,
    }


def test_a_cell_goes_on_after_a_cut_of_the_cable(seen: dict[str, Any]) -> None:
    assert seen["cut"]["dead"] == []


def test_a_cell_goes_on_after_a_sleep_of_the_notebook(seen: dict[str, Any]) -> None:
    assert seen["cut"]["slept"] == ["runs\n", "goes on\n"]


def test_nothing_stays_of_kept_ranks_whose_hosts_are_lost(seen: dict[str, Any]) -> None:
    """Of the controller, the keepers and the ranks. The program looked."""
    alive, processes = seen["cut"]["kept"]
    assert alive
    assert processes > 3


def test_a_host_is_given_up_after_the_time_that_is_set(seen: dict[str, Any]) -> None:
    why = "rank 0 is dead: the ssh to host-b has ended (exit code 255), and with it the"
    assert seen["cut"]["lost"].startswith(why)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("python", "host-b: there is no /nowhere/python there: name the Python that"),
        ("rankscope", "has no rankscope: install Rankscope"),
        ("key", "strange: its host key is not known here"),
        ("port", "closed: no sshd listens there"),
        (
            "shell",
            "nobody@host-b: what ssh ran there ended with 1 and did not answer: ",
        ),
        ("login", "unknown@host-b: it lets nobody in without a password"),
        ("twice", "host-b and root@host-b are one host"),
        ("interface", "--interface eth7: no interface or IPv4 address of this"),
        ("reach", "host-b cannot connect to the controller at 127.0.0.1, port "),
        ("firewall", f"host-a cannot connect to host-b at {two_hosts.THERE}, port "),
        (
            "firewall",
            f"host-b cannot connect to the controller at {two_hosts.HERE}, port ",
        ),
        ("firewall", f"host-b cannot connect to host-a at {two_hosts.HERE}, port "),
        ("room", "100000 ranks are too many for host-b"),
        ("mpi", "Host key verification failed"),
    ],
)
def test_what_cannot_work_is_an_error_that_names_the_host(
    seen: dict[str, Any], what: str, words: str
) -> None:
    """The program looked that nothing stays of the start."""
    assert words in seen["refused"]["said"][what]


def test_an_interrupted_start_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["interrupted"]["missing"] == []


def test_kept_ranks_outlive_their_notebook_and_end_on_all_hosts(
    seen: dict[str, Any],
) -> None:
    """Another notebook finds them, and starts one again on its own host."""
    kept = seen["kept"]
    assert kept["alive"]
    assert kept["found"] == {str(rank): rank * 100 for rank in range(4)}
    assert kept["places"] == PLACES
    assert kept["seconds"] < 10


def test_ranks_of_mpiexec_are_in_the_order_of_their_hosts(
    seen: dict[str, Any],
) -> None:
    """And end with a notebook that is killed."""
    assert seen["mpi"]["ranks"] == PLACES
    assert seen["mpi"]["seconds"] < 15


def test_all_ends_with_a_notebook_that_is_killed(seen: dict[str, Any]) -> None:
    """At three steps of its start, also with ranks to keep; in cells; in a restart."""
    seconds = seen["killed"]["seconds"]
    assert len(seconds) == 2 * len(ssh_hosts.STARTING) + len(ssh_hosts.RUNNING)
    assert max(seconds.values()) < 10
