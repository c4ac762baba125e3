"""Trainings over the backend ``rankscope``, compared with one process.

Each function trains on all ranks of the default group, and returns the largest
difference of a parameter from that of a training in one process with all the data. The
ranks of `test_backend` import the module.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import (
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from rankscope.backends.torch_backend.private import release
from rankscope.backends.work.flight_recorder import recorder

STEPS = 6
#: Small buckets, so that a pass has several.
BUCKET_MB = 0.01


class Net(torch.nn.Module):  # type: ignore[misc]
    """Three layers; `skips`: a fourth is not used, `recomputes`: by checkpointing."""

    def __init__(self, *, skips: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 64)
        self.second = torch.nn.Linear(64, 64)
        self.third = torch.nn.Linear(64, 1)
        if skips:
            self.unused = torch.nn.Linear(4, 4)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            hidden = checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)
        else:
            hidden = self.inner(x)
        return self.third(torch.relu(hidden))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def batch(step: int) -> torch.Tensor:
    """Return the data of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 16, generator=generator)


def own(step: int) -> torch.Tensor:
    """Return the data of this rank in a step."""
    return batch(step)[dist.get_rank() :: dist.get_world_size()]


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def do_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def alone(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the parameters after a training in one process."""
    model = Net()
    optimizer = adam(model)
    for step in range(steps):
        do_step(model, optimizer, batch(step))
    return {name: one.detach() for name, one in model.named_parameters()}


def difference(
    model: torch.nn.Module,
    steps: int = STEPS,
    expected: dict[str, torch.Tensor] | None = None,
) -> float:
    """Return how far the parameters are from those of `alone`, or from `expected`."""
    expected = expected or alone(steps)
    return max(
        (full(one.detach()) - expected[name]).abs().max().item()
        for name, one in model.named_parameters()
        if name in expected
    )


def full(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def train(model: Any, optimizer: torch.optim.Optimizer) -> float:
    for step in range(STEPS):
        do_step(model, optimizer, own(step))
    return difference(getattr(model, "module", model))


def ddp(module: Net | None = None, hook: Any = None, state: Any = None, **more: Any):
    """Train a DistributedDataParallel."""
    model = DistributedDataParallel(module or Net(), bucket_cap_mb=BUCKET_MB, **more)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return train(model, adam(model))


def power_sgd() -> float:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1
    )
    return ddp(hook=powerSGD_hook.powerSGD_hook, state=state)


def no_sync() -> float:
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        one, *others = own(step).split(1)
        with model.no_sync():
            for part in others:
                (model(part).pow(2).mean() / (len(others) + 1)).backward()
        (model(one).pow(2).mean() / (len(others) + 1)).backward()
        optimizer.step()
    return difference(model.module)


def delayed_gradients() -> float:
    """Sum the gradients of two layers at the end of the pass, which torch drops."""
    module = Net()
    late = [(n, p) for n, p in module.named_parameters() if not n.startswith("first")]
    return ddp(
        module,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=module.first.weight,
    )


def join(**options: bool) -> float:
    """Train with more data on the last ranks; return how far the ranks are apart."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
    optimizer = adam(model)
    with model.join(**options):
        for step in range(STEPS + dist.get_rank()):
            do_step(model, optimizer, own(step))
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return max((one - flat).abs().max().item() for one in gathered)


def zero() -> float:
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(model, sharded)


def fsdp(mesh: Any = None) -> float:
    model = Net()
    for layer in (model.first, model.second, model.third, model):
        fully_shard(layer, mesh=mesh)
    return train(model, adam(model))


def hsdp() -> float:
    size = dist.get_world_size()
    return fsdp(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rep", "sh")))


def tensor_parallel() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)
    optimizer = adam(model)
    for step in range(STEPS):
        do_step(model, optimizer, batch(step))
    return difference(model)


def saved_and_loaded() -> float:
    model = Net()
    fully_shard(model)
    train(model, adam(model))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoints.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    fresh = Net()
    fully_shard(fresh)
    state = {"model": fresh.state_dict()}
    checkpoints.load(state, checkpoint_id=folder[0])
    fresh.load_state_dict(state["model"])
    return difference(fresh)


def saved_meanwhile() -> float:
    """Save a checkpoint while the training goes on."""
    model = Net()
    fully_shard(model)
    optimizer = adam(model)
    for step in range(STEPS // 2):
        do_step(model, optimizer, own(step))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saving = checkpoints.async_save(
        {"model": model.state_dict()},
        checkpoint_id=folder[0],
        process_group=dist.new_group(),
    )
    for step in range(STEPS // 2, STEPS):
        do_step(model, optimizer, own(step))
    saving.result()
    fresh = Net()
    fully_shard(fresh)
    state = {"model": fresh.state_dict()}
    checkpoints.load(state, checkpoint_id=folder[0])
    fresh.load_state_dict(state["model"])
    return max(difference(model), difference(fresh, STEPS // 2))


def compiled() -> float:
    model = DistributedDataParallel(Net())
    optimizer = adam(model)
    traced = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        do_step(traced, optimizer, own(step))
    return difference(model.module)


def pipelined(schedule: type) -> float:
    """Do a pass of a pipeline with two stages on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(2 * size)]
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    whole = copy.deepcopy(torch.nn.Sequential(*layers))
    here = rank, rank + size
    stages = [
        PipelineStage(layers[place], place, 2 * size, torch.device("cpu"))
        for place in here
    ]
    run = schedule(stages, 2 * size, loss_fn=torch.nn.functional.mse_loss)
    # The first stage takes the input, the last one the target.
    run.step(*[x] * (rank == 0), **({"target": y} if rank == size - 1 else {}))
    torch.nn.functional.mse_loss(whole(x), y).backward()
    return max(
        (layers[place].weight.grad - whole[place].weight.grad).abs().max().item()
        for place in here
    )


def reduced(bucket: Any) -> Any:
    """Reduce a bucket, and wait for it in the hook."""
    dist.all_reduce(bucket.buffer(), async_op=True).get_future().wait()
    bucket.buffer().div_(dist.get_world_size())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def overlapped_zero() -> float:
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    hook = hook_with_zero_step(default_hooks.allreduce_hook, model, sharded)
    model.register_comm_hook(None, hook)
    # It updates nothing in the first two passes.
    for step in (0, 0, *range(STEPS)):
        do_step(model, sharded, own(step))
    return difference(model.module)


def sparse_gradients() -> float:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    one = torch.nn.Embedding(10, 4)
    model = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    model.module.load_state_dict(one.state_dict())
    words = torch.arange(2 * size) % 7
    model(words[rank::size]).pow(2).mean().backward()
    one(words).pow(2).mean().backward()
    found = model.module.weight.grad.to_dense()
    return (found - one.weight.grad).abs().max().item()


def halved(reduced: torch.dtype = torch.float16, **more: Any) -> Any:
    """Return a DistributedDataParallel that computes with 16 bits."""
    precision = _MixedPrecision(
        param_dtype=torch.float16, reduce_dtype=reduced, buffer_dtype=torch.float16
    )
    return DistributedDataParallel(
        Net(), bucket_cap_mb=BUCKET_MB, mixed_precision=precision, **more
    )


def halved_alone(reduced: torch.dtype, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the parameters after the training of `halved` in one process."""
    model, half, size = Net(), Net().half(), dist.get_world_size()
    optimizer = adam(model)
    pairs = list(zip(model.parameters(), half.parameters(), strict=True))
    for step in range(steps):
        sums = [torch.zeros_like(one, dtype=reduced) for one in half.parameters()]
        for rank in range(size):
            for whole, one in pairs:
                one.data.copy_(whole.data)
                one.grad = None
            half(batch(step)[rank::size].half()).pow(2).mean().backward()
            for total, (_, one) in zip(sums, pairs, strict=True):
                assert one.grad is not None
                total += one.grad
        for total, (whole, _) in zip(sums, pairs, strict=True):
            whole.grad = (total / size).float()
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def mixed_precision(reduced: torch.dtype = torch.float16, **more: Any) -> float:
    model = halved(reduced, **more)
    optimizer = adam(model)
    for step in range(STEPS):
        do_step(model, optimizer, own(step))
    return difference(model.module, expected=halved_alone(reduced))


def optimizer_in_backward(**more: Any) -> float:
    net = Net()
    _apply_optimizer_in_backward(torch.optim.Adam, net.parameters(), {"lr": 0.01})
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, **more)
    for step in range(STEPS):
        model(own(step)).pow(2).mean().backward()
    assert all(one.grad is None for one in net.parameters())
    return difference(net)


def second_ddp() -> float:
    """Train a module in a DistributedDataParallel, then in another one."""
    net = Net()
    optimizer, numbers = adam(net), []
    first = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    model = first
    for step in range(STEPS):
        if step == STEPS // 2:
            first(own(0))  # it expects gradients now
            first._remove_autograd_hooks()
            model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
        before = recorder.count
        do_step(model, optimizer, own(step))
        numbers.append(recorder.count - before)
    assert numbers[: STEPS // 2] == numbers[STEPS // 2 :], numbers
    return difference(net)


#: Each training, and how far it may be from one process: hooks that compress lose bits.
TRAININGS: dict[str, tuple[Callable[[], float], float]] = {
    "ddp": (ddp, 1e-5),
    "static_graph": (lambda: ddp(static_graph=True), 1e-5),
    "find_unused": (lambda: ddp(Net(skips=True), find_unused_parameters=True), 1e-5),
    "bucket_view": (lambda: ddp(gradient_as_bucket_view=True), 1e-5),
    "checkpointing": (lambda: ddp(Net(recomputes=True)), 1e-5),
    "hook": (lambda: ddp(hook=default_hooks.allreduce_hook), 1e-5),
    "fp16_hook": (lambda: ddp(hook=default_hooks.fp16_compress_hook), 0.05),
    "static_hook": (
        lambda: ddp(hook=default_hooks.fp16_compress_hook, static_graph=True),
        0.05,
    ),
    "power_sgd": (power_sgd, 0.3),
    "no_sync": (no_sync, 1e-5),
    "delayed_gradients": (delayed_gradients, 1e-5),
    "join": (join, 0.0),
    # Its backward pass reads the value of a future.
    "join_of_ranks_left": (lambda: join(divide_by_initial_world_size=False), 0.0),
    "zero": (zero, 1e-5),
    "fsdp": (fsdp, 1e-5),
    "hsdp": (hsdp, 1e-5),
    "tensor_parallel": (tensor_parallel, 1e-5),
    "saved_and_loaded": (saved_and_loaded, 1e-5),
    "sparse_gradients": (sparse_gradients, 1e-6),
    "saved_meanwhile": (saved_meanwhile, 1e-5),
    "compiled": (compiled, 1e-5),
    "pipelined": (lambda: pipelined(ScheduleInterleaved1F1B), 1e-6),
    "pipelined_without_bubbles": (
        lambda: pipelined(ScheduleInterleavedZeroBubble),
        1e-6,
    ),
    # Torch refuses its hook by the name where there is no NCCL.
    "bf16_hook": (
        lambda: ddp(
            hook=lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        ),
        0.05,
    ),
    "waiting_hook": (lambda: ddp(hook=lambda state, bucket: reduced(bucket)), 1e-5),
    "overlapped_zero": (overlapped_zero, 1e-5),
    "mixed_precision": (mixed_precision, 1e-3),
    "mixed_precision_reduced_with_32_bits": (
        lambda: mixed_precision(torch.float32),
        1e-5,
    ),
    "mixed_precision_static_graph": (lambda: mixed_precision(static_graph=True), 1e-3),
    "mixed_precision_bucket_view": (
        lambda: mixed_precision(gradient_as_bucket_view=True),
        1e-3,
    ),
    "optimizer_in_backward": (optimizer_in_backward, 1e-5),
    "optimizer_in_backward_bucket_view": (
        lambda: optimizer_in_backward(gradient_as_bucket_view=True),
        1e-5,
    ),
    "second_ddp_after_the_removal_of_autograd_hooks": (second_ddp, 1e-5),
}

# What torch itself refuses on CPUs with 2.7, and not with 2.10.
if release < (2, 10):
    del TRAININGS["hsdp"], TRAININGS["overlapped_zero"]
