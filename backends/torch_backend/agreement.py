"""Which step the ranks go on from, and which rank has its state for which others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import DistBackendError
from ..rank_sets import name_ranks

__all__ = ["Held", "Hook", "LostStateError", "choose"]


class LostStateError(DistBackendError):
    """No rank has the state of some ranks: a checkpoint has to be loaded."""


@dataclass(frozen=True)
class Hook:
    """A communication hook of DDP: its name, the ranks, how many steps it has done."""

    name: str
    ranks: tuple[int, ...]
    iteration: int = 0


@dataclass(frozen=True)
class Held:
    """What one rank tells of its model and optimizer."""

    #: The ranks that have the same parameters as this one, which is among them.
    replicas: tuple[int, ...]
    #: What is equal where names, shapes and dtypes of the parameters are.
    layout: str
    #: How many steps it has done; ``None``: the optimizer does not count them.
    steps: int | None = 0
    #: Whether it is a fresh process of a rank that died.
    is_fresh: bool = False
    #: Whether all of its state is of one step.
    is_whole: bool = True
    #: What is equal where DDP has the same buckets.
    buckets: tuple[int, ...] = ()
    #: The communication hooks of its modules of DDP.
    hooks: tuple[Hook, ...] = ()
    #: Why no such model goes on; empty: it may.
    refusal: str = ""


def choose(told: Mapping[int, Held]) -> tuple[int, dict[int, int]]:
    """Return the step to go on from, and by rank which one sends its state.

    It is the latest step of which each part of the model is on a rank that lives.

    Raises `ValueError` where the ranks do not say the same of the model, one refuses
    it, or ranks with other parameters do not count steps; `LostStateError` where there
    is no such step.
    """
    for held in told.values():
        if held.refusal:
            raise ValueError(held.refusal)
    for rank, held in told.items():
        for other in held.replicas:
            theirs = told.get(other)
            if theirs is None or theirs.replicas != held.replicas:
                raise ValueError(
                    f"rejoin: rank {rank} has the same model as "
                    f"{name_ranks(held.replicas)}, and rank {other} does not say so: "
                    "all of them call it, with models over the same ranks"
                )
            if theirs.layout != held.layout:
                raise ValueError(
                    f"rejoin: the parameters of ranks {rank} and {other} differ in "
                    "names, shapes or dtypes; expected the same model. A model that "
                    "differs from rank to rank, as the stages of a pipeline do, is in "
                    "a DistributedDataParallel whose group has the ranks of a stage"
                )
    _require_same_hooks(told)
    parts = sorted({held.replicas for held in told.values()})
    if len(parts) > 1 and any(held.steps is None for held in told.values()):
        raise ValueError(
            "rejoin: ranks have different parameters, and the optimizer does not count "
            "its steps, so nobody knows whether they are of the same one: give step="
        )
    # Where all processes are fresh they are as at the start of the script.
    is_start = all(held.is_fresh for held in told.values())
    able = {
        rank
        for rank, held in told.items()
        if is_start or (held.is_whole and not held.is_fresh)
    }
    steps = [
        {told[rank].steps or 0 for rank in able.intersection(part)} for part in parts
    ]
    lost = [part for part, found in zip(parts, steps, strict=True) if not found]
    if lost:
        ranks = sorted(rank for part in lost for rank in part)
        torn = [one for one in ranks if not told[one].is_whole]
        why = f" ({name_ranks(torn)} may have parts of two steps)" if torn else ""
        raise LostStateError(
            f"rejoin: the state of {name_ranks(ranks)} is lost{why}, and no other rank "
            f"has it; {_LOAD}",
            culprits=ranks,
        )
    common = set.intersection(*steps)
    if not common:
        found = ", ".join(
            f"{name_ranks(part)} of step {max(of)}"
            for part, of in zip(parts, steps, strict=True)
        )
        raise LostStateError(
            f"rejoin: the ranks have different parameters, and those of no step are on "
            f"all of them ({found}); {_LOAD}"
        )
    step = max(common)
    return step, {
        rank: next(
            one
            for one in held.replicas
            if one in able and (told[one].steps or 0) == step
        )
        for rank, held in told.items()
    }


_LOAD = (
    "load a checkpoint (torch.distributed.checkpoint.load) on all ranks, in a function "
    "given as rankscope.torch.rejoin(model, optimizer, load=...)"
)


def _require_same_hooks(told: Mapping[int, Held]) -> None:
    for rank, held in told.items():
        own = [(one.name, one.ranks) for one in held.hooks]
        for other in sorted({other for _, ranks in own for other in ranks}):
            theirs = [(one.name, one.ranks) for one in told[other].hooks]
            if theirs != own:
                names, others = (
                    ", ".join(name for name, _ in hooks) for hooks in (own, theirs)
                )
                raise ValueError(
                    f"rejoin: rank {rank} has the communication hooks {names}, and "
                    f"rank {other} has {others or 'none'}: register_comm_hook is "
                    "called on all ranks, before rejoin"
                )
