"""DDP's hooks for mixed precision, optimizers in the backward pass, delayed gradients.

They were written for accelerators. Four things stand in their way: torch has no events
on CPUs, and no streams where it was built for GPUs; they wait for their all_reduce in
C++; mixed precision of torch sends the buckets of some passes without the gradients in
them; and nobody waits for the all_reduce of delayed gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from . import private, sharded
from .driving import Backward

__all__ = ["end_failed_passes", "install"]


class _Accelerator:
    """``torch.accelerator`` where there is none: its stream is that of the CPU."""

    @staticmethod
    def current_stream() -> torch.cpu.Stream:
        return torch.cpu.current_stream()


class _Stream(contextlib.nullcontext[None], torch.cpu.Stream):  # type: ignore[misc]
    """A stream of the CPU, in whose block is what would be issued on it."""


class _TorchOnCPU:
    """The module ``torch``, whose events and streams are those of the CPU.

    Work on a CPU is done when it is started: they have nothing to wait for.
    """

    Event, Stream, accelerator = torch.cpu.Event, _Stream, _Accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def install() -> None:
    """Have DDP's hooks work over groups of the backend; later calls do nothing."""
    if not torch.accelerator.is_available():
        for owner, name in private.hooks_with_streams:
            private.replace(owner, name, _on_cpu)
    private.replace(*private.upcast_hook, _filling)
    private.replace(*private.run_allreduce_hook, _driven)
    private.replace(*private.delayed_hook, _waiting)


def end_failed_passes(model: torch.nn.Module) -> None:
    """Have the parameters of `model` be as between two backward passes.

    Raises `ValueError` where an optimizer steps in the backward pass: the one that
    failed has done a part of its step.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"rejoin: the optimizer of parameter {name!r} steps in the backward "
                "pass, and one that failed has done a part of its step: drop the "
                "gradients (zero_grad), load a checkpoint, call "
                "_remove_autograd_hooks() of the DistributedDataParallel, and make "
                "another one over the module"
            )
    for module in private.replicas(model):
        private.restore_precision(module)
        private.restore_local_tensors(module)
    sharded.reset_fully_sharded(model)


def _on_cpu(function: FunctionType) -> Callable[..., Any]:
    """Return `function` with `_TorchOnCPU` for its global name ``torch``."""
    names = {**function.__globals__, "torch": _TorchOnCPU()}
    made = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


def _driven(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``Reducer._run_allreduce_hook`` with a future that is driven in Python."""

    def run_allreduce(reducer: Any, bucket: Any) -> Any:
        backward = Backward.current()
        if backward is None:
            return run(reducer, bucket)
        before = len(backward.pending)
        future = run(reducer, bucket)
        # What C++ returns is another object for the future of our op, if it is one.
        return future if len(backward.pending) == before else backward.pending[-1]

    return run_allreduce


def _waiting(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the hook of delayed gradients, which are summed when it returns.

    Torch's issues the all_reduce and drops its Work: the optimizer may be earlier.
    """

    def waiting(self: Any, gradient: Any) -> Any:
        group = self.process_group
        if not hasattr(private.cpu_backend(group), "of_rankscope"):
            return hook(self, gradient)
        self._delay_grad_buffer.div_(group.size())
        torch.distributed.all_reduce(self._delay_grad_buffer, group=group)
        return gradient

    return functools.update_wrapper(waiting, hook)


def _filling(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the hook of mixed precision, which fills the bucket first.

    The views into which torch copies the gradients are not those of the buffer that it
    sends: in the first pass, and with ``gradient_as_bucket_view`` from the third on.
    """

    def filling(state: Any, bucket: Any) -> Any:
        backend = private.cpu_backend(state.ddp_weakref().process_group)
        if bucket.buffer().is_cpu and hasattr(backend, "of_rankscope"):
            for parameter, part in zip(
                bucket.parameters(), bucket.gradients(), strict=True
            ):
                if parameter.grad is None:
                    part.zero_()
                else:
                    part.copy_(parameter.grad)
        return hook(state, bucket)

    return functools.update_wrapper(filling, hook)
