"""Models with sharded parameters: a hang is ended, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from tests.with_torch.cells import WAIT, run, values

pytestmark = pytest.mark.in_order

SETUP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
def make(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def loss(model):
    return model(torch.ones(2, 8)).square().sum()
def step(model, optimizer):
    optimizer.zero_grad()
    found = loss(model)
    found.backward()
    optimizer.step()
    return found.item()
expected = [step(*alone) for alone in [make(net())] for _ in range(4)]
"""


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Four ranks of torch."""
    with Cluster.start(4, torch="gloo", timeout=300) as started:
        run(started, SETUP)
        yield started


def hang(cluster: Cluster, code: str) -> list[str]:
    """Run a cell that rank 2 leaves early, end it, rebuild; return what is stale."""
    execution = cluster.execute(code)
    verdicts = until(lambda: cluster.diagnose(stall=0.5), WAIT)
    assert {rank for one in verdicts for rank in one.culprits} >= {2}
    cluster.abort(None, "by the test", verdicts=verdicts)
    assert execution.wait(WAIT)
    assert {one.ename for one in execution.errors.values()} == {"DistAbortedError"}
    assert 2 not in execution.errors
    return cluster.rebuild()


@pytest.mark.parametrize(
    ("shape", "names"), [((4,), ("shard",)), ((2, 2), ("copy", "shard"))]
)
def test_fully_shard_trains_on(
    cluster: Cluster, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    run(
        cluster,
        f"mesh = init_device_mesh('cpu', {shape}, mesh_dim_names={names})\n"
        "sharded = make(fully_shard(net(), mesh=mesh))\n"
        "seen = [step(*sharded)]",
    )
    in_forward = "if rank != 2: loss(sharded[0])"
    in_backward = "found = loss(sharded[0])\nif rank != 2: found.backward()"
    for code in (in_forward, in_backward):
        assert hang(cluster, code) == []
        run(cluster, "seen.append(step(*sharded))")
    found = values(cluster, "seen.append(step(*sharded))", "seen", "expected")
    for seen, expected in found.values():
        assert seen == pytest.approx(expected)


def test_a_model_of_fsdp1_is_named_with_the_line_to_type(cluster: Cluster) -> None:
    make = (
        "sharded = make(FullyShardedDataParallel("
        "net(), device_id=torch.device('cpu')))\nseen = [step(*sharded)]"
    )
    run(cluster, make)
    (sentence,) = hang(cluster, "if rank != 2: step(*sharded)")
    assert sentence.startswith("on ranks 0–3, a FullyShardedDataParallel")
    assert "model = FullyShardedDataParallel(" in sentence
    for seen, expected in values(cluster, make, "seen", "expected").values():
        assert seen == pytest.approx(expected[:1])
