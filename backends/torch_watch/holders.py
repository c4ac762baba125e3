"""What a rebuild mends in the program: references to the group, and sharded models."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType
from typing import Any

from .private.models import is_made, move_model, root_groups

__all__ = ["move", "objects", "reset"]


def move(old: Any, new: Any) -> list[str]:
    """Replace `old` by `new` in variables, attributes and containers of the process.

    Torch's own registry is not meant: it must not have `old` any more. Returns what
    holds `old` still: tuples, which cannot be changed, and running functions.
    """
    left = []
    running = _running_frames()
    for module in data_parallel_modules(old):
        # One whose construction has failed may be held by a traceback.
        if is_made(module) and not move_model(module, new):
            left.append(
                "a DistributedDataParallel (make it anew: "
                "model = rankscope.torch.rewrap(model))"
            )
    _move_defaults(old, new)
    holders = list(_holders(old))
    for holder in holders:
        if isinstance(holder, dict):
            _move_in_dict(holder, old, new)
        elif isinstance(holder, list):
            for place, one in enumerate(holder):
                if one is old:
                    holder[place] = new
        elif isinstance(holder, set):
            holder.discard(old)
            holder.add(new)
        elif isinstance(holder, CellType):
            holder.cell_contents = new
        elif isinstance(holder, FrameType):
            # A frame that is over is held by a traceback, which no code reads.
            if id(holder) not in running:
                continue
            code = holder.f_code
            left.append(
                f"a variable of {code.co_name}() in {code.co_filename}, line "
                f"{holder.f_lineno}"
            )
        elif isinstance(holder, tuple):
            # The arguments of a call that has failed, as a traceback holds them.
            if _is_of_ended_call(holder, holders, running):
                continue
            left.append(f"a {type(holder).__name__} of {len(holder)} elements")
        else:
            _move_in_object(holder, old, new)
            if _contains(gc.get_referents(holder), old):
                left.append(f"an object of type {type(holder).__name__}")
    return left


def data_parallel_modules(group: Any) -> list[Any]:
    loaded = sys.modules.get("torch.nn.parallel.distributed")
    if loaded is None:
        return []
    kind = loaded.DistributedDataParallel
    # By type, since an instance may be a proxy that answers as another class.
    return [
        one
        for one in objects(lambda found: issubclass(found, kind))
        if vars(one).get("process_group") is group
    ]


def objects(wanted: Callable[[type], bool]) -> list[Any]:
    """Return the objects whose type is `wanted`; it is asked once for each type."""
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in known:
            known[kind] = wanted(kind)
        if known[kind]:
            found.append(one)
    return found


def _holders(old: Any) -> Iterator[Any]:
    """Yield what refers to `old`, but what this package knows of it."""
    own = _own()
    for holder in gc.get_referrers(old):
        if id(holder) not in own:
            yield holder
    # The collector does not know the attributes of an object that have no references
    # themselves: it does not track groups, nor a dict of things that it does not track.
    # Functions and classes are most of the objects; programs keep no groups in them.
    most = FunctionType, type
    for one in objects(lambda kind: bool(kind.__dictoffset__) and kind not in most):
        for inner in gc.get_referents(one):
            if (
                type(inner) is dict
                and id(inner) not in own
                and not gc.is_tracked(inner)
                and _contains(list(inner.values()), old)
            ):
                yield inner


def _contains(values: Iterable[Any], wanted: Any) -> bool:
    # A comprehension would keep its variable in a cell, which is a holder as well.
    for one in values:  # noqa: SIM110
        if one is wanted:
            return True
    return False


def _running_frames() -> set[int]:
    """Return the ids of the frames that the threads of this process execute."""
    running = set()
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
    return running


def _is_of_ended_call(held: Any, known: list[Any], running: set[int]) -> bool:
    """Return whether only frames that are over, and the list `known`, have `held`."""

    def ended(one: Any) -> bool:
        return isinstance(one, FrameType) and id(one) not in running

    def is_locals(one: Any) -> bool:
        # As whoever shows a traceback asks for them; the frame then keeps the dict.
        return type(one) is dict and any(map(ended, gc.get_referrers(one)))

    def is_here(one: Any) -> bool:
        return isinstance(one, FrameType) and one.f_globals is globals()

    return all(
        one is known or ended(one) or is_locals(one) or is_here(one)
        for one in gc.get_referrers(held)
    )


def _own() -> set[int]:
    """Return the ids of this package's objects, of their containers and its frames."""
    package = __name__.rpartition(".")[0]
    own = set()
    for one in objects(lambda kind: str(kind.__module__).startswith(package)):
        own.add(id(one))
        for inner in gc.get_referents(one):
            own.add(id(inner))
            if type(inner) is dict:
                # A copy: other threads go on, and change them.
                own.update(map(id, list(inner.values())))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__package__") == package:
        own.add(id(frame))
        frame = frame.f_back
    return own


def _move_defaults(old: Any, new: Any) -> None:
    """Replace `old` as the default of an argument, as of torch.distributed.nn."""
    for function in objects(lambda kind: kind is FunctionType):
        defaults = function.__defaults__
        if defaults is not None and _contains(defaults, old):
            moved = [new if one is old else one for one in defaults]
            function.__defaults__ = tuple(moved)
        if function.__kwdefaults__ is not None:
            _move_in_dict(function.__kwdefaults__, old, new)


def _move_in_dict(holder: dict[Any, Any], old: Any, new: Any) -> None:
    for key, value in list(holder.items()):
        if value is old:
            holder[key] = new
    if _contains(list(holder), old):
        holder[new] = holder.pop(old)


def _move_in_object(holder: Any, old: Any, new: Any) -> None:
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        _move_in_dict(attributes, old, new)
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if getattr(holder, name, None) is old:
                object.__setattr__(holder, name, new)


def reset(group: Any) -> list[str]:
    """Bring the models over `group` to the state between two steps.

    An abort ends the step on the ranks at different places. A rank that has gathered
    its parameters, and one that has not, would issue different ops in the next step.
    Returns a sentence on each model that torch cannot reset.
    """
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return []
    fsdp1 = torch_fsdp.FullyShardedDataParallel
    fsdp2 = torch_fsdp.FSDPModule
    found = [
        _first_version(one, group)
        if issubclass(type(one), fsdp1)
        else _reset(one, group)
        for one in objects(lambda kind: issubclass(kind, (fsdp1, fsdp2)))
    ]
    return [*filter(None, found)]


def _reset(module: Any, group: Any) -> str:
    """Reset a module of ``fully_shard``; return a sentence where torch cannot."""
    if group not in root_groups(module):
        return ""
    if not hasattr(module, "reset_iter_state"):
        return (
            "a model of fully_shard (a step that the abort ended cannot be undone in "
            "this torch: make the model anew, then new.load_state_dict("
            "model.state_dict()))"
        )
    try:
        module.reset_iter_state()
    except RuntimeError as error:
        return (
            f"a model of fully_shard (it was not reset: {error}; make it anew, then "
            "new.load_state_dict(model.state_dict()))"
        )
    return ""


def _first_version(module: Any, group: Any) -> str:
    if vars(module).get("process_group") is not group:
        return ""
    return (
        "a FullyShardedDataParallel (where the abort ended a step of it, make it anew: "
        "model = FullyShardedDataParallel(...))"
    )
