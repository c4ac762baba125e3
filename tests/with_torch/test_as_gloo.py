"""Whole trainings over the backend ``rankscope`` and over torch's gloo: equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.torch_backend.private import release
from tests.with_torch.ranks import Ranks
from tests.with_torch.test_backend import begun

SETUP = """
import tempfile
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.pipelining import Schedule1F1B

every = list(range(world_size))
groups = {
    "gloo": dist.new_group(backend="gloo"),
    "rankscope": dist.new_group(backend="rankscope"),
}

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

def ddp(group, **more):
    return training.DistributedDataParallel(
        training.Net(), process_group=group, bucket_cap_mb=0.01, **more)

def accumulated(group):
    # bfloat16, two batches for each step, and clipped gradients.
    model = ddp(group, gradient_as_bucket_view=True)
    optimizer, losses = adamw(model), []
    def backward(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
    for step in range(4):
        optimizer.zero_grad()
        first, second = training.own(step).chunk(2)
        with model.no_sync():
            backward(first)
        backward(second)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [*model.parameters(), *losses]

def compressed(group):
    state = training.powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2,
        min_compression_rate=1)
    # One bucket: gloo calls the hook's callbacks in any order, and ends the process.
    model = training.DistributedDataParallel(training.Net(), process_group=group)
    model.register_comm_hook(state, training.powerSGD_hook.powerSGD_hook)
    return stepped(model, adamw(model), training.own, 5)

def stepped(model, optimizer, data, steps=4):
    for step in range(steps):
        training.do_step(model, optimizer, data(step))
    return list(model.parameters())

def zero(group):
    model = ddp(group)
    return stepped(model, training.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01),
        training.own)

def mesh(group):
    return DeviceMesh.from_group(group, "cpu")

def sharded(group):
    # Half of it, then a checkpoint, which another model loads and goes on from.
    def made():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = training.Net()
        for one in model.first, model.second, model:
            training.fully_shard(one, mesh=mesh(group), mp_policy=policy)
        return model, adamw(model)
    def state(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    first = made()
    stepped(*first, training.own, 2)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoints.save(
        state(*first), checkpoint_id=folder[0], process_group=group)
    model, optimizer = made()
    found = state(model, optimizer)
    checkpoints.load(found, checkpoint_id=folder[0], process_group=group)
    set_state_dict(model, optimizer, model_state_dict=found["model"],
        optim_state_dict=found["optimizer"])
    for step in 2, 3:
        optimizer.zero_grad()
        model(training.own(step)).float().pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [one.to_local() for one in model.parameters()]

def flat(group):
    # FSDP1 frees the memory that it gathers, and fills it again.
    losses = []
    for use_orig_params in True, False:
        model = FullyShardedDataParallel(training.Net(), group,
            device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        losses += stepped(model, adamw(model), training.own)
    return losses

def tensor_parallel(group):
    plan = {"first": training.ColwiseParallel(), "second": training.RowwiseParallel()}
    model = training.parallelize_module(training.Net(), mesh(group), plan)
    stepped(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
        training.batch)
    return [getattr(one, "_local_tensor", one) for one in model.parameters()]

def pipelined(group):
    torch.manual_seed(rank)
    layer = torch.nn.Linear(8, 8)
    stage = training.PipelineStage(
        layer, rank, world_size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(
        stage, 2 * world_size, loss_fn=torch.nn.functional.mse_loss)
    optimizer = adamw(layer)
    x, y = torch.randn(2, 4 * world_size, 8, generator=torch.Generator().manual_seed(7))
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(*[x] * (rank == 0), **({"target": y} if stage.is_last else {}))
        optimizer.step()
    return list(layer.parameters())

def compiled(group):
    def mixed(x):
        whole = functional.all_gather_tensor(x, 0, group)
        parts = functional.reduce_scatter_tensor(whole.sin(), "sum", 0, group)
        moved = functional.all_to_all_single(whole, None, None, group)
        return functional.all_reduce(parts * 2, "avg", group) + moved[: len(x)].cos()
    torch._dynamo.reset()
    traced = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    return [traced(training.own(step).contiguous()) for step in range(3)]

def difference(train):
    found = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        found[name] = [one.detach().clone() for one in train(group)]
    pairs = zip(*found.values(), strict=True)
    # A rank may have nothing of a parameter.
    return max((one - other).abs().max().item()
        for one, other in pairs if one.numel())
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with begun(2, SETUP) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "name",
    [
        "accumulated",
        "compressed",
        "zero",
        "flat",
        "tensor_parallel",
        # Gloo of torch 2.7 sums where a reduce_scatter takes the average, and both its
        # ranks wait for ever in 1F1B.
        *(("sharded", "compiled", "pipelined") if release >= (2, 10) else ()),
    ],
)
def test_a_training_ends_with_the_bits_of_gloo(ranks: Ranks, name: str) -> None:
    """Of two numbers the sum is the same in either order."""
    ranks.run(f"found = difference({name})\nassert found == 0, found")
