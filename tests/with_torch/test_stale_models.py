"""Models that are from before an abort, and are used after `rebuild`: no wrong values.

An abort may find ranks in different steps, and modules keep what a pass that failed has
left. `rejoin` mends that; without it their next pass is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.torch_backend.private import release
from tests.with_torch.ranks import Ranks
from tests.with_torch.test_backend import begun

pytestmark = pytest.mark.in_order

SETUP = """
import itertools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import ScheduleGPipe
from rankscope.backends.work.hooks import add_op_hook

line = init_device_mesh("cpu", (world_size,))
replicas = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("copy", "shard"))
cpu = torch.device("cpu")

def of(model, data=training.own):
    # A model, its optimizer, and how it does a step.
    optimizer = training.adam(model)
    return model, optimizer, lambda number: training.do_step(
        model, optimizer, data(number))

def sharded(mesh=None):
    model = training.Net()
    for one in model.first, model.second, model:
        training.fully_shard(one, mesh=mesh)
    return of(model)

def tensor_parallel(change=lambda model: model):
    plan = {"first": training.ColwiseParallel(), "second": training.RowwiseParallel()}
    model = training.parallelize_module(training.Net(), line, plan)
    return of(change(model), training.batch)

def compiled(model):
    return torch.compile(model, backend="aot_eager")

def pipeline():
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    stage = training.PipelineStage(layer, rank, world_size, cpu)
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = training.adam(layer)
    x = torch.ones(4, 8)
    def step(number):
        optimizer.zero_grad()
        schedule.step(*[x] * (rank == 0), **({"target": x} if rank else {}))
        optimizer.step()
    return layer, optimizer, step

def zero():
    # Gradients of the rank itself: it is the optimizer that has ops.
    model = training.Net()
    optimizer = training.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01)
    return model, optimizer, lambda number: training.do_step(
        model, optimizer, training.batch(number))

KINDS = {
    "ddp": lambda: of(training.DistributedDataParallel(training.Net())),
    "fsdp": sharded,
    "flat": lambda: of(FullyShardedDataParallel(training.Net(), device_id=cpu)),
    "hsdp": lambda: sharded(replicas),
    "tensor_parallel": tensor_parallel,
    "compiled_tensor_parallel": lambda: tensor_parallel(compiled),
    "pipeline": pipeline,
    "zero": zero,
}

settled = itertools.count()

def settle():
    # Return on rank 1 when rank 0 has ended what it was in: an abort may not strike it.
    dist.barrier()
    store, key = dist.distributed_c10d._get_default_store(), f"settled/{next(settled)}"
    if rank == 0:
        store.set(key, "")
    store.wait([key])

def abort_at(number, call):
    # Have rank 1 abort at an op of the call; return whether it ended before.
    settle()
    issued = []
    def count(record):
        issued.append(record)
        if len(issued) == number + 1 and rank == 1:
            rankscope.torch.abort(reason="at an op")
    counting = add_op_hook(pre=count)
    try:
        call()
        # A rank that has done it has the error at its next op.
        dist.barrier()
    except (rankscope.DistAbortedError, RuntimeError) as error:
        # DDP's static graph waits in C++, and has no type of the error.
        assert "at an op" in str(error), error
        return False
    finally:
        counting.remove()
    return True

def refused(step, number):
    error = raised(lambda: step(number))
    assert isinstance(error, rankscope.DistBackendError), repr(error)
    assert "is from before the group was rebuilt" in str(error), error
    assert "on all ranks, " in str(error), error
    return str(error)

def abort_at_ops(make):
    # The model is refused after every second one, and another of its kind is not.
    for number in range(0, 40, 2):
        model, optimizer, step = make()
        step(0)
        if abort_at(number, lambda: step(1)):
            return number
        rankscope.torch.rebuild()
        _, _, its_step = other = make()
        refused(step, 1)
        its_step(0)
        refused(step, 1)
    raise AssertionError("it does not end")
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with begun(2, SETUP) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "fsdp",
        "flat",
        # Torch 2.7 refuses it on CPUs.
        *(("hsdp",) if release >= (2, 10) else ()),
        "tensor_parallel",
        "compiled_tensor_parallel",
        "pipeline",
        "zero",
    ],
)
def test_a_model_that_has_not_rejoined_is_refused(ranks: Ranks, kind: str) -> None:
    """After an abort at ops of its step, whatever came of it on this rank."""
    ranks.run(f"assert abort_at_ops(KINDS[{kind!r}]) > 0")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "compiled_tensor_parallel"])
def test_rejoin_ends_that_for_its_model_alone(ranks: Ranks, kind: str) -> None:
    ranks.run(
        f"first, second = KINDS[{kind!r}](), KINDS[{kind!r}]()\n"
        "for *_, step in first, second:\n"
        "    step(0)\n"
        "assert not abort_at(0, lambda: first[2](1))\n"
        "rankscope.torch.rebuild()\n"
        "assert 'rankscope.torch.rejoin(model, optimizer)' in refused(first[2], 1)\n"
        "for number in range(rankscope.torch.rejoin(*first[:2]), 4):\n"
        "    first[2](number)\n"
        "assert number == 3\n"
        "expected = training.alone(4).values()\n"
        "found = map(training.full, first[0].parameters())\n"
        "assert all(torch.allclose(one, other.detach(), atol=1e-6)\n"
        "    for one, other in zip(expected, found, strict=True))\n"
        "refused(second[2], 1)"
    )


def test_each_stage_of_a_pipeline_goes_on_as_it_was(ranks: Ranks) -> None:
    """Stages of the same shapes, which no other rank has."""
    ranks.run(
        "layer, optimizer, step = pipeline()\n"
        "step(0)\n"
        "assert not abort_at(2, lambda: step(1))\n"
        "rankscope.torch.rebuild()\n"
        "assert rankscope.torch.rejoin(layer, optimizer) == 1\n"
        "unbroken, _, its_step = pipeline()\n"
        "its_step(0)\n"
        "for number in 1, 2:\n"
        "    step(number)\n"
        "    its_step(number)\n"
        "assert torch.equal(layer.weight, unbroken.weight)"
    )
