"""DeviceMesh: its shape, its parts and its groups, as rank 0 of 4, and over 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.groups.world import world
from rankscope.device_mesh import init_device_mesh


def grid() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_a_mesh_has_a_group_along_each_dimension(group: dist.ProcessGroup) -> None:
    mesh = grid()
    assert (mesh.shape, mesh.ndim, mesh.size()) == ((2, 2), 2, 4)
    assert (mesh.size(0), mesh.size("tp"), mesh.size(-1)) == (2, 2, 2)
    assert (mesh.get_rank(), mesh.get_coordinate()) == (0, (0, 0))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="read-only"):
        mesh.mesh[0, 0] = 1
    dp, tp = mesh.get_all_groups()
    assert (dp.ranks, tp.ranks) == ([0, 2], [0, 1])
    assert mesh.get_group("dp") is mesh.get_group(0) is dp
    assert mesh.get_local_rank("tp") == 0
    # The board and every message show these names.
    assert [one.name for one in world.summary()] == ["default", "dp", "tp"]
    assert repr(mesh) == (
        "DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))"
    )


def test_parts_of_a_mesh_have_its_groups(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    count = dist.get_pg_count()
    tp = mesh["tp"]
    assert (tp.mesh.tolist(), tp.mesh_dim_names) == ([0, 1], ("tp",))
    assert tp.get_group() is tp.get_group("tp") is mesh.get_group("tp")
    assert tp.get_local_rank() == 0
    turned = mesh["tp", "dp"]
    assert turned.mesh.tolist() == [[0, 2], [1, 3]]
    assert turned.get_all_groups() == [mesh.get_group("tp"), mesh.get_group("dp")]
    assert turned["dp"] == mesh["dp"]
    assert hash(turned["dp"]) == hash(mesh["dp"])
    assert turned != mesh["dp", "tp"]
    assert mesh["dp", "pp", "tp"] is mesh
    assert dist.get_pg_count() == count


def test_dimensions_are_flattened_into_one(group: dist.ProcessGroup) -> None:
    mesh = grid()
    flat = mesh["dp", "tp"]._flatten("both")
    assert (flat.mesh.tolist(), flat.get_group().ranks) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert flat.get_group().group_desc == "both"
    assert mesh["both"] is flat is mesh._flatten("both")
    assert mesh.get_group("both") is flat.get_group()
    with pytest.raises(ValueError, match="'dp' is the name of another part"):
        mesh["tp"]._flatten("dp")


def test_a_rank_outside_the_mesh(group: dist.ProcessGroup) -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    mesh = dist.DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("a", "b"))
    assert mesh.get_coordinate() is None
    assert mesh.get_all_groups() == [outside, outside]
    assert mesh.get_local_rank("a") == -1
    assert mesh["a"].get_group() is outside
    assert mesh["b"].get_coordinate() is None
    assert dist.get_pg_count() == 1


def test_the_world_without_names_is_the_default_group(
    group: dist.ProcessGroup,
) -> None:
    assert init_device_mesh("cpu", (4,)).get_group() is group
    other = init_device_mesh("cpu", (4,), backend_override={0: "cpu:manual"})
    assert str(other.get_group().config) == "cpu:manual"
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    assert named.get_group().group_desc == "dp"


def test_a_mesh_of_groups_that_are_there(group: dist.ProcessGroup) -> None:
    dp, tp = dist.new_group([0, 2]), dist.new_group([0, 1])
    assert isinstance(dp, dist.ProcessGroup)
    assert isinstance(tp, dist.ProcessGroup)
    ranks = np.arange(4).reshape(2, 2)
    mesh = dist.DeviceMesh.from_group(
        [dp, tp], "cpu", ranks, mesh_dim_names=("dp", "tp")
    )
    assert mesh.get_all_groups() == [dp, tp]
    line = dist.DeviceMesh.from_group(tp, "cpu")
    assert (line.mesh.tolist(), line.get_group()) == ([0, 1], tp)
    with pytest.raises(ValueError, match="group of dimension 0 has ranks 0–1, mesh"):
        dist.DeviceMesh.from_group([tp, dp], "cpu", ranks)
    with pytest.raises(ValueError, match="2 groups without mesh"):
        dist.DeviceMesh.from_group([dp, tp], "cpu")


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too large": (
        lambda: init_device_mesh("cpu", (2, 3)),
        ValueError,
        "mesh has ranks 0–5; expected global ranks from 0 to 3",
    ),
    "a rank twice": (
        lambda: dist.DeviceMesh("cpu", [0, 1, 1]),
        ValueError,
        "each rank once",
    ),
    "ranks that are floats": (
        lambda: dist.DeviceMesh("cpu", [0.0, 1.0]),
        TypeError,
        "dtype float64; expected an array of integers",
    ),
    "a device with an index": (
        lambda: init_device_mesh("cuda:0", (4,)),
        ValueError,
        "'cuda:0'; expected a device type without an index",
    ),
    "names of another number": (
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)),
        ValueError,
        "expected 2 different names",
    ),
    "an empty dimension": (
        lambda: init_device_mesh("cpu", (4, 0)),
        ValueError,
        "at least 1 rank along each",
    ),
    "an override of nothing": (
        lambda: init_device_mesh("cpu", (4,), backend_override={"dp": "manual"}),
        ValueError,
        "backend_override has 'dp'",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_wrong_mesh_makes_no_group(group: dist.ProcessGroup, case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
    assert dist.get_pg_count() == 1


def test_what_a_mesh_does_not_have(group: dist.ProcessGroup) -> None:
    mesh, bare = grid(), init_device_mesh("cpu", (2, 2))
    with pytest.raises(
        KeyError, match="no dimension 'pp'; expected 0 to 1 or 'dp', 't"
    ):
        mesh["pp"]
    with pytest.raises(KeyError, match="one twice"):
        mesh["dp", "dp"]
    with pytest.raises(RuntimeError, match="without mesh_dim_names"):
        bare["dp"]
    with pytest.raises(RuntimeError, match="2 dimensions; expected mesh_dim"):
        mesh.get_group()
    with pytest.raises(IndexError, match="mesh_dim=2; expected 0 to 1"):
        bare.get_group(2)


def two_ways(me: Rank) -> list[float]:
    """Sum along rows, then along columns: every rank has the sum of all in the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = np.array([me.rank + 1.0])
    dist.all_reduce(x, group=mesh.get_group("tp"))
    seen = [float(x[0])]
    dist.all_reduce(x, group=mesh["dp"].get_group())
    dist.destroy_process_group()
    return [*seen, float(x[0])]


@pytest.mark.processes
def test_ranks_are_split_in_two_ways() -> None:
    """The mesh makes the default group, too."""
    assert run_ranks(4, two_ways, timeout=60) == [
        [3, 10],
        [3, 10],
        [7, 10],
        [7, 10],
    ]
