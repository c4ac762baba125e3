"""Values that travel between a notebook and its ranks."""

from __future__ import annotations

import datetime
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import numpy as np
import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, PullError
from rankscope.engines.cluster import variables
from rankscope.engines.cluster.value_server import ValueServer
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.wire import ipyparallel_private as private
from rankscope.engines.wire import rank_variables

pytestmark = pytest.mark.processes

WAIT = 60.0
LARGE = 3 * rank_variables.LARGE


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as started:
        yield started


def doubled(x: Any) -> Any:
    return 2 * x


ARRAYS = {
    "small": np.arange(3.0),
    "large": np.arange(LARGE, dtype=np.uint8),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "many dates": np.arange(LARGE).astype("M8[s]"),
    "durations": np.array([1, 2], "m8[ms]"),
    "records": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "objects": np.array([None, "text"], object),
    "a view": np.arange(100)[::3],
    "no element": np.empty((0, 3), np.float32),
    "in Fortran's order": np.asfortranarray(np.ones((3, 4))),
}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[ValueServer]:
    """The servers of the notebook for large values."""
    made: list[ValueServer] = []
    begin = ValueServer.__init__

    def note(self: ValueServer, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(ValueServer, "__init__", note)
    return made


@pytest.fixture
def far(
    monkeypatch: pytest.MonkeyPatch, servers: list[ValueServer]
) -> list[ValueServer]:
    """The ranks are on another host, as far as the notebook knows; its servers."""
    monkeypatch.setattr(RankSlot, "is_here", property(lambda slot: False))
    return servers


def threads_of_values() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "rankscope-values"]


@pytest.mark.parametrize("where", ["servers", "far"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_writable_copies(
    cluster: Cluster, request: pytest.FixtureRequest, name: str, where: str
) -> None:
    servers: list[ValueServer] = request.getfixturevalue(where)
    array = ARRAYS[name]
    read_only = array.copy()
    read_only.flags.writeable = False
    for sent in (array, read_only):
        cluster.push({"value": sent, "inside": {"of": sent}}, timeout=WAIT)
        cluster.execute(
            "assert value.flags.writeable and inside['of'].flags.writeable\n"
            "value[:1] = value[:1]"
        ).result(WAIT)
        for found in cluster.pull("value", timeout=WAIT).values():
            assert found.flags.writeable
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    # Large values, and no others, went over connections, which between hosts are
    # encrypted as the controller's are.
    moved = [one.moved for one in servers]
    assert all(one.port.encrypted == (where == "far") for one in servers)
    if array.nbytes >= rank_variables.LARGE:
        assert len(moved) == 4
        assert all(one.moved == one.total >= 2 * array.nbytes for one in servers)
    else:
        assert sum(moved) == 0
    assert threads_of_values() == []


def test_several_large_values_of_a_rank_and_what_it_lacks(
    cluster: Cluster, far: list[ValueServer]
) -> None:
    cluster.execute("a = np.full(2 << 20, rank, 'u1'); b = a + 1").result(WAIT)
    pulled = cluster.pull(["a", "b"], timeout=WAIT)
    for rank, found in pulled.items():
        assert (found["a"] == rank).all()
        assert (found["b"] == rank + 1).all()
    with pytest.raises(
        PullError, match="ranks 0–1: there is no variable 'absent'"
    ) as e:
        cluster.pull(["a", "absent"], timeout=WAIT)
    assert [one["a"][-1] for one in e.value.values.values()] == [0, 1]
    assert len(far) == 2


#: Rank 1 reads a first piece of what comes, and then does something else.
AMID_A_PUSH = """
from rankscope.engines.wire import value_port
if rank == 1 and not hasattr(value_port, "kept"):
    value_port.kept = value_port.receive_frames
    def receive_frames(sock, lengths):
        value_port.kept(sock, [1 << 20])
        {then}
    value_port.receive_frames = receive_frames
"""
AFTER_IT = """
if hasattr(value_port, "kept"):
    value_port.receive_frames = value_port.kept
    del value_port.kept
"""
#: More than sockets hold.
HUGE = np.zeros(64 << 20, np.uint8)


def test_an_interrupt_amid_a_value_leaves_everything_usable(
    cluster: Cluster, far: list[ValueServer], tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    wait = f"while not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.01)"
    wait += "\n        return value_port.kept(sock, lengths)"
    code = "import pathlib, time\n" + AMID_A_PUSH.format(then=wait)
    cluster.execute(code).result(WAIT)

    def interrupt(moved: int, total: int) -> None:
        if moved:
            raise KeyboardInterrupt

    before = psutil.Process().num_fds()
    with pytest.raises(KeyboardInterrupt):
        cluster.push({"huge": HUGE}, 1, timeout=WAIT, progress=interrupt)
    flag.touch()
    assert far[0].moved < HUGE.nbytes
    assert threads_of_values() == []
    assert psutil.Process().num_fds() <= before
    cluster.execute(AFTER_IT + "assert 'huge' not in globals()").result(WAIT)
    cluster.push({"huge": HUGE}, timeout=WAIT)
    assert cluster.pull("huge", 1, timeout=WAIT)[1].nbytes == HUGE.nbytes
    cluster.execute("dist.barrier(); del huge").result(WAIT)


NOTED = """
from rankscope.engines.wire.value_port import ValuePort
kept, answers = ValuePort.send, []
def noting(port, frames):
    try:
        answers.append(kept(port, frames))
    except ConnectionError:
        answers.append("lost")
        raise
    return answers[-1]
ValuePort.send = noting
huge = np.zeros(64 << 20, "u1")
"""


def test_an_interrupted_pull_has_the_ranks_send_nothing_afterwards(
    cluster: Cluster,
    far: list[ValueServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taking = ValueServer._note

    def take_one_piece(server: ValueServer, count: int) -> None:
        # Else the whole value may have come before the interrupt.
        taking(server, count)
        until(lambda: server._closed, WAIT, "the interrupt")
        raise OSError

    monkeypatch.setattr(ValueServer, "_note", take_one_piece)
    cluster.execute(NOTED).result(WAIT)
    flag = tmp_path / "go"
    busy = cluster.execute(
        f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)",
        ranks=1,
    )

    def interrupt(moved: int, total: int) -> None:
        if moved:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.pull("huge", timeout=WAIT, progress=interrupt)
    flag.touch()
    busy.result(WAIT)
    # Rank 0 was amid its value; rank 1 came to the request after the interrupt.
    after = "ValuePort.send = kept; del huge; answers"
    cell = cluster.execute(after, keep_value=True).result(WAIT)
    assert cluster.values(cell, timeout=WAIT) == {0: ["lost"], 1: [None]}
    assert far[0].moved < HUGE.nbytes


def test_a_connection_that_is_lost_amid_a_value_names_the_rank(
    cluster: Cluster, far: list[ValueServer]
) -> None:
    cluster.execute(AMID_A_PUSH.format(then="raise OSError('cut')")).result(WAIT)
    with pytest.raises(
        ClusterError,
        match="^push of huge: rank 1: ConnectionError: the connection to the notebook "
        "was lost amid the value: cut$",
    ):
        cluster.push({"huge": HUGE}, timeout=WAIT)
    cluster.execute(AFTER_IT).result(WAIT)


@pytest.mark.parametrize("why", ["refused", "no server"])
def test_without_a_connection_values_go_by_message(
    cluster: Cluster, far: list[ValueServer], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "refused":
        serving = ValueServer.towards

        def closed(*args: Any) -> ValueServer | None:
            server = serving(*args)
            assert server is not None
            server.close()
            return server

        monkeypatch.setattr(ValueServer, "towards", closed)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
        for slot in cluster._registry.slots:
            monkeypatch.setattr(slot, "address", "192.0.2.1")
    # For a large message zmq would begin a thread in this process that never ends.
    monkeypatch.setattr(variables, "LARGE", 1)
    small = ARRAYS["a view"]
    cluster.push({"value": small}, timeout=WAIT)
    make = f"large = np.arange({LARGE}, dtype='u1')"
    cluster.execute(f"assert value.tolist() == {small.tolist()}\n{make}").result(WAIT)
    for found in cluster.pull("large", timeout=WAIT).values():
        np.testing.assert_array_equal(found, ARRAYS["large"])
    assert [one.moved for one in far] == ([0, 0] if why == "refused" else [])


def test_functions_and_classes_are_sent_with_their_code(cluster: Cluster) -> None:
    function = types.FunctionType(doubled.__code__, {}, "function")
    function.__module__ = "__main__"
    cluster.push({"function": function, "both": [function, 1]}, timeout=WAIT)
    cluster.execute("assert function(4) == 8 and both[0](1) == 2").result(WAIT)


def test_what_cannot_be_made_here_leaves_the_rest(cluster: Cluster) -> None:
    cluster.execute("class Q: pass\nq = Q() if rank else 3\nx = rank").result(WAIT)
    with pytest.raises(PullError) as caught:
        cluster.pull(["q", "x", "absent"], timeout=WAIT)
    assert caught.value.values == {0: {"q": 3, "x": 0}, 1: {"x": 1}}
    assert str(caught.value) == (
        "pull of q, x, absent: rank 0: there is no variable 'absent'; rank 1: q is a Q "
        "of the cells of the ranks, which cannot be made here (AttributeError: Can't "
        "get attribute 'Q' on "
        f"{sys.modules['__main__']!r}): define or import it here, too, "
        "or pull what it has, as in y = vars(q); there is no variable 'absent'"
    )
    cell = cluster.execute("q", keep_value=True).result(WAIT)
    with pytest.raises(PullError, match="pull of the value: rank 1: the value is a Q"):
        cluster.values(cell)


def test_what_cannot_be_pickled_is_named(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        cluster.push({"lock": threading.Lock()})
    cluster.execute("import threading; lock = threading.Lock()").result(WAIT)
    with pytest.raises(PullError, match="ranks 0–1: lock cannot be pickled: TypeError"):
        cluster.pull("lock", timeout=WAIT)
    cluster.push({"when": datetime.datetime(2020, 1, 1)}, timeout=WAIT)


def test_nothing_is_kept(cluster: Cluster) -> None:
    own = [psutil.Process(), *map(psutil.Process, cluster.pids.values())]
    cluster.pull("rank", timeout=WAIT)
    before = [one.num_fds() for one in own]
    for _ in range(3):
        cluster.push({"value": ARRAYS["large"]}, timeout=WAIT)
        cluster.pull("value", timeout=WAIT)
    after = [one.num_fds() for one in own]
    assert all(now <= was for now, was in zip(after, before, strict=True))


def test_a_name_that_is_absent_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no variable 'absent'"):
        cluster.pull("absent", [0], timeout=WAIT)


def test_a_late_answer_to_a_dropped_request_says_nothing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client would print "got stale result" into whatever cell runs."""
    registry = cluster._registry
    dropped: Any = private.probe(registry.client, registry.slots[0].uuid)
    private.discard_request(registry.client, dropped.msg_id)
    # Its answer comes before this one's.
    cluster.pull("__name__", [0], timeout=WAIT)
    assert capsys.readouterr().out == ""


def test_a_late_answer_of_an_engine_that_is_lost_says_nothing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end is announced on another connection than its answers."""
    client, slot = cluster._registry.client, cluster._registry.slots[0]
    call = "__import__('time').sleep(0.2)"
    answer: Any = private.evaluate(client, slot.uuid, call)
    client._io_loop.add_callback(
        client._handle_stranded_msgs, slot.engine_id, slot.uuid
    )
    with pytest.raises(ipyparallel.error.RemoteError, match="died while running"):
        raise answer.result(WAIT)
    cluster.pull("__name__", [0], timeout=WAIT)
    assert capsys.readouterr().out == ""


def test_a_rank_that_dies_amid_a_value_is_named(
    cluster: Cluster, far: list[ValueServer]
) -> None:
    die = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    cluster.execute(AMID_A_PUSH.format(then=die)).result(WAIT)
    with pytest.raises(ClusterError, match="^rank 1 is dead: killed by SIGKILL"):
        cluster.push({"huge": HUGE}, timeout=WAIT)
    assert threads_of_values() == []
    cluster.push({"value": ARRAYS["large"]}, 0, timeout=WAIT)
    np.testing.assert_array_equal(cluster.pull("value", 0)[0], ARRAYS["large"])
    cluster.restart(1)
