"""Models that were used before a group was rebuilt: refused until `rejoin`.

An abort may find ranks in different steps, and modules keep what a pass that failed has
left: gradients to which the next one would add, parameters that were gathered. Used as
they are, they would go on with wrong values and no error.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ..errors import DistBackendError
from ..work.flight_recorder import recorder
from . import private, sharded
from .private import Shell

__all__ = [
    "accept",
    "accepting",
    "install",
    "note",
    "note_model",
    "refuse",
    "refuse_model",
]


#: By the DDP model: the group, and its generation, of its constructor, or of `rejoin`;
#: ``None``: it was made without the values of the other ranks.
_used: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# Of those that are in `rejoin`, whose ops are not refused.
_accepting = 0
#: Python code between an op and what issues it.
_BETWEEN = (__name__.partition(".")[0], "torch._dynamo", "torch._compile")
#: The functions of torch.distributed: who calls an op otherwise is a functional
#: collective, as of DTensors.
_API = "torch.distributed.distributed_c10d"


@functools.cache
def install() -> None:
    """Have `DistributedDataParallel` refuse a pass; later calls do nothing.

    It is no user of `sharded.users`: its passes have no op before the first bucket.
    """
    private.replace(*private.before_forward, _refusing)


def _refusing(begin: Callable[..., Any]) -> Callable[..., Any]:
    check = private.disable_dynamo(_check)

    def begin_pass(self: Any, *inputs: Any, **named: Any) -> Any:
        check(self)
        return begin(self, *inputs, **named)

    return functools.update_wrapper(begin_pass, begin)


def _check(model: Any) -> None:
    """Raise `DistBackendError` where a DDP model was used before a rebuild."""
    shell = private.cpu_backend(model.process_group)
    if not hasattr(shell, "of_rankscope"):
        return
    # A copy of a model has had no constructor.
    now = _stamp(shell)
    made = _used.setdefault(model, now)
    if made != now and not _accepting:
        raise _error("forward", shell, model, _OLD if made else _WITHOUT_VALUES)


def note_model(model: Any, shell: Shell) -> None:
    """Note a new DDP model, whose values are those of the other ranks."""
    _used[model] = _stamp(shell)


def refuse_model(model: Any) -> None:
    """Refuse passes of a new DDP model until `rejoin`, which gives it its values."""
    _used[model] = None


def _stamp(shell: Shell) -> tuple[Any, int]:
    return shell.group.key, shell.group.generation


def note(shell: Shell) -> None:
    """Note what may issue ops of a model in the group, which was rebuilt.

    FSDP2 refuses from now on to gather parameters, as not every pass has an op: a rank
    may have gathered them in the one that failed. The others are in ``shell.stale``.
    """
    global _found
    count, found = _found
    if count != recorder.count:
        # Once for all groups of a rebuild, as no op is between them.
        found = weakref.WeakKeyDictionary(sharded.users())
        _found = recorder.count, found
    shell.rebuilt, shell.passes = True, False
    shell.stale = weakref.WeakSet()
    for one, groups in found.items():
        if all(private.cpu_backend(group) is not shell for group in groups):
            continue
        if sharded.is_parameters(one):
            sharded.end_pass(one)
            one.unshard = _refusing_to_gather(shell, weakref.ref(one))
        else:
            shell.stale.add(one)


# How many ops there were when it was looked for, and what was found.
_found: tuple[int, weakref.WeakKeyDictionary[Any, list[Any]]] = (
    -1,
    weakref.WeakKeyDictionary(),
)


def _refusing_to_gather(shell: Shell, weak: weakref.ref[Any]) -> Callable[[bool], None]:
    def unshard(async_op: bool = False) -> None:
        one: Any = weak()
        if not _accepting:
            raise _error("all_gather", shell, one.modules[0])
        type(one).unshard(one, async_op)

    return unshard


def refuse(shell: Shell, op: str, issued: FrameType) -> None:
    """Raise `DistBackendError` where the op at the frame `issued` is of ``stale``."""
    if _accepting:
        return
    frame: FrameType | None = issued
    caller, in_module = "", False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not caller and not module.startswith(_BETWEEN):
            caller = module
        one = _first_argument(frame)
        if isinstance(one, torch.nn.Module):
            in_module = True
            for part in one.modules():
                if part in shell.stale:
                    raise _error(op, shell, part)
        elif any(one is other for other in shell.stale):  # it may have no hash
            raise _error(op, shell, one)
        frame = frame.f_back
    if in_module:
        shell.passes = True
    elif caller != _API and not shell.passes:
        # Of a backward pass, or of compiled code: no frame says of which model.
        for one in shell.stale:
            if isinstance(one, torch.nn.Module):
                raise _error(op, shell, one)


def _first_argument(frame: FrameType) -> Any:
    """Return what a method is of; the functions of FSDP1 have it as `state`."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


_OLD = (
    "is from before the group was rebuilt, so ranks may be in different steps, and it "
    "may have parts of a pass that failed"
)
_WITHOUT_VALUES = (
    "was made without the values of the other ranks, which did not make one in the "
    "same line"
)


def _error(op: str, shell: Shell, of: Any, why: str = _OLD) -> DistBackendError:
    remedy = "make the model anew, and load a checkpoint"
    if not isinstance(shell, private.c10d.Backend) and not sharded.is_of(
        of, sharded.FSDP1
    ):
        remedy = f"call rankscope.torch.rejoin(model, optimizer) first, or {remedy}"
    return DistBackendError(
        f"{op} in {shell.group.describe()}: a {type(of).__name__} {why}: on all ranks, "
        f"{remedy}"
    )


# -- their end ------------------------------------------------------------


@contextlib.contextmanager
def accepting() -> Iterator[None]:
    """Refuse no op in the block."""
    global _accepting
    _accepting += 1
    try:
        yield
    finally:
        _accepting -= 1


def accept(
    shells: list[Shell],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Do not refuse the model and its optimizer any more: ranks have the same step."""
    parts = set(model.modules())
    for module in parts:
        if isinstance(module, private.DistributedDataParallel):
            _used[module] = _stamp(private.cpu_backend(module.process_group))
        for one in sharded.parameter_groups(module):
            vars(one).pop("unshard", None)
    for shell in shells:
        for one in list(shell.stale):
            if (
                one is optimizer
                or one in parts
                or (
                    sharded.is_of(one, sharded.SCHEDULE)
                    and all(stage.submod in parts for stage in sharded.stages(one))
                )
            ):
                shell.stale.discard(one)
