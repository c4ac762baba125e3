"""Torch's groups are found by themselves, whatever made them."""

from __future__ import annotations

from rankscope.backends.conformance.waiting import until
from tests.with_torch.ranks import Ranks


def names(ranks: Ranks, rank: int = 0) -> list[str]:
    return [one.name for one in ranks.ask(rank, "world.summary()")]


def test_new_groups_have_the_same_names_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(
        "tp = dist.new_group([0, 1], group_desc='tp')\n"
        "dist.new_group([0, 1], group_desc='tp')\n"
        "dist.new_group([0])\n"
        "dist.new_group([0, 1])\n"
    )
    assert names(ranks, 0) == ["default_pg", "tp", "tp (2)", "group 3", "group 4"]
    assert names(ranks, 1) == ["default_pg", "tp", "tp (2)", "group 4"]


def test_ranks_that_make_different_groups_are_told(ranks: Ranks) -> None:
    """As those that make only the groups that they are in, pytorch#25390."""
    ranks.run(
        "said = ''\n"
        "try:\n"
        "    dist.new_group([rank])\n"
        "except ValueError as error:\n"
        "    said = str(error)\n"
    )
    heard = [ranks.ask(rank, "said") for rank in range(2)]
    # Which of them is the first is a matter of chance.
    late = 0 if heard[0] else 1
    assert heard[1 - late] == ""
    assert heard[late] == (
        f"new_group on rank {late}: this rank makes a group of rank {late}, while rank "
        f"{1 - late} makes one of rank {1 - late}. All ranks have to call new_group() "
        "for every group, in the same order; with use_local_synchronization=True, its "
        "members"
    )
    ranks.run("dist.all_reduce(x)")


def test_a_group_that_is_destroyed_vanishes_with_its_records(ranks: Ranks) -> None:
    ranks.run("tp = dist.new_group(group_desc='tp'); dist.all_reduce(x, group=tp)")
    assert names(ranks) == ["default_pg", "tp"]
    assert [one["group"] for one in ranks.ask(0, "local_dump()")["records"]] == ["tp"]
    ranks.run("dist.destroy_process_group(tp)")
    assert names(ranks) == ["default_pg"]
    assert ranks.ask(0, "local_dump()")["records"] == []


def test_a_new_default_group_has_no_records_of_the_old_one(ranks: Ranks) -> None:
    ranks.run("dist.all_reduce(x); dist.all_reduce(x); dist.destroy_process_group()")
    assert names(ranks) == []
    ranks.init()
    assert names(ranks) == ["default_pg"]
    ranks.run("dist.barrier()")
    (record,) = ranks.ask(0, "local_dump()")["records"]
    assert (record["op"], record["collective_seq_id"]) == ("barrier", 1)


def test_the_groups_of_a_mesh_have_the_names_of_its_dimensions(ranks: Ranks) -> None:
    ranks.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))\n"
        "line = mesh.get_group('dp')\n"
        "dist.all_reduce(x, group=line)\n"
    )
    assert "dp" in names(ranks)
    assert ranks.groups(0)["dp"].ranks == (0,)
    assert ranks.groups(1)["dp"].ranks == (1,)
    # A summary may be as old as the last reading of torch's recorder.
    done = until(lambda: ranks.groups(1)["dp"].completed, 30, "the op to be seen")
    assert done.op == "all_reduce"


def test_the_ops_of_fsdp_are_shown_with_the_users_line(ranks: Ranks) -> None:
    ranks.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('shard',))\n"
        "model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
    )
    records = ranks.ask(0, "local_dump()")["records"]
    ops = [one["op"] for one in records]
    assert "all_gather_into_tensor" in ops
    assert "reduce_scatter_tensor" in ops
    sources = {one["frame"]["source"] for one in records}
    assert any(one.startswith("cell") and one.endswith(":5") for one in sources)


def test_groups_that_are_older_than_the_watch_are_found() -> None:
    preamble = "import torch, torch.distributed as dist\n"
    with Ranks(2, preamble) as ranks:
        ranks.init()
        ranks.run(
            "x = torch.ones(3)\ntp = dist.new_group(group_desc='tp')\n"
            "dist.all_reduce(x)\n"
            "import rankscope.torch\nrankscope.torch.watch()\n"
            "from rankscope.backends.groups.world import world\n"
            "from rankscope.backends.observe.export import local_dump\n"
        )
        assert names(ranks) == ["default_pg", "tp"]
        ranks.run("dist.all_reduce(x, group=tp)")
        records = ranks.ask(1, "local_dump()")["records"]
        assert [(one["group"], one["op"]) for one in records] == [
            ("default_pg", "all_reduce"),
            ("tp", "all_reduce"),
        ]
        assert records[0]["frame"]["source"] == ""
        assert records[1]["frame"]["source"].startswith("cell")


def test_the_watch_waits_for_the_import_of_torch() -> None:
    preamble = "import sys\nimport rankscope.torch\nrankscope.torch.watch()\n"
    with Ranks(1, preamble) as ranks:
        assert ranks.ask(0, "'torch' in sys.modules") is False
        assert ranks.ask(0, "rankscope.torch.watch().rank") is None
        assert ranks.ask(0, "os.environ['TORCH_FR_BUFFER_SIZE']") == "256"
        ranks.run(
            "import torch, torch.distributed as dist\n"
            "from rankscope.backends.groups.world import world\n"
        )
        ranks.init()
        assert names(ranks) == ["default_pg"]
