"""Values that travel between a notebook and its ranks."""

from __future__ import annotations

import datetime
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from rankscope.engines import Cluster, ClusterError, PullError
from rankscope.engines.wire import ipyparallel_private as private
from rankscope.engines.wire import rank_variables, values

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


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_writable_copies(cluster: Cluster, name: str) -> None:
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


def test_a_value_without_shared_memory_goes_by_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.engines.cluster.variables.LARGE", 1)
    monkeypatch.setattr(values.MemoryFile, "write", lambda frames: None)
    cluster.push({"value": np.arange(1000).astype(np.uint8)}, timeout=WAIT)
    monkeypatch.undo()
    same = "assert (value == np.arange(value.size).astype('u1')).all()"
    cluster.execute(same).result(WAIT)
    # That of another process has another beginning.
    file = values.MemoryFile.write([b"x"])
    assert file is not None
    other = values.MemoryFile(file.pid, file.descriptor, b"?" * 16, file.lengths)
    assert values.read_memory_file(file) == [bytearray(b"x")]
    assert values.read_memory_file(other) is None
    file.close()
    assert values.read_memory_file(file) is None


def test_nothing_is_kept(cluster: Cluster) -> None:
    mine = psutil.Process()
    before = mine.num_fds()
    for _ in range(3):
        cluster.push({"value": ARRAYS["large"]}, timeout=WAIT)
        cluster.pull("value", timeout=WAIT)
    assert mine.num_fds() <= before
    cell = cluster.execute(
        "import os\n"
        "folder = '/proc/self/fd'\n"
        "paths = [os.path.join(folder, one) for one in os.listdir(folder)]\n"
        "held = [os.readlink(path) for path in paths if os.path.lexists(path)]\n"
        "assert not any('rankscope-values' in one for one in held), held"
    )
    cell.result(WAIT)


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
