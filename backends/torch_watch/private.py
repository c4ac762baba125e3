"""The private and undocumented names of torch that the watch uses, each probed.

A name that a version of torch lacks has a sentence in `Names.missing`: what is not
shown without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["C10D", "RECORDER_SIZE", "RPC", "Names", "RpcNames", "loaded", "probe"]

#: The module of torch that holds the registry of groups.
C10D = "torch.distributed.distributed_c10d"

#: The module of torch's RPC.
RPC = "torch.distributed.rpc"

#: The variables with the number of entries of torch's Flight Recorder, newest first.
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

Dump = Callable[[bool, bool, bool], bytes]


@dataclass
class Names:
    """What `probe` found in one version of torch.

    Attributes
    ----------
    c10d
        The module `C10D`.
    dump
        Torch's Flight Recorder: ``dump(collectives, stacks, only_active)`` returns a
        pickle. ``None`` where there is none.
    missing
        A sentence for each name that this torch lacks.
    """

    c10d: ModuleType
    version: str
    dump: Dump | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def registry(self) -> Any:
        """Torch's registry of groups: ``pg_map``, ``pg_group_ranks`` and others."""
        return getattr(self.c10d, "_world", None)

    @property
    def reads_old_size(self) -> bool:
        """Whether this torch reads the second of `RECORDER_SIZE`; newer ones warn."""
        major, minor = self.version.split(".")[:2]
        return (int(major), int(minor)) < (2, 9)

    def groups(self) -> list[Any]:
        """Return the registered ``ProcessGroup`` objects, in the order of creation."""
        registry = self.registry
        return [] if registry is None else list(registry.pg_map)

    def ranks(self, group: Any) -> tuple[int, ...] | None:
        """Return the global ranks of `group`; ``None`` while it is being made."""
        places = self.registry.pg_group_ranks.get(group)
        if places is None:
            return None
        return tuple(sorted(places, key=places.__getitem__))

    def config(self, group: Any) -> dict[str, str]:
        """Return the backend of each device type, e.g. ``{"cpu": "gloo"}``."""
        text = self.registry.pg_backend_config.get(group)
        if not text:
            return {}
        # An undefined backend has a part without a colon.
        parts = (part.partition(":") for part in str(text).split(","))
        found = {device: name for device, _, name in parts if name}
        if len(found) > 1 and not sys.modules["torch"].backends.cuda.is_built():
            # gloo declares itself for CUDA also where torch has none.
            found.pop("cuda", None)
        return found

    def timeout(self, group: Any) -> float | None:
        """Return the timeout of the ops of `group` in seconds, where torch says it."""
        for device in getattr(group, "_device_types", ()):
            options = getattr(group._get_backend(device), "options", None)
            limit = getattr(options, "_timeout", None)
            if limit is not None:
                return limit.total_seconds()
        return None

    def store(self, group: Any) -> Any:
        """Return torch's store of `group`, over a connection of its own if it can.

        A thread that waits for a key of a store blocks the other users of the
        connection. ``None`` where `group` is gone.
        """
        known = self.registry.pg_map.get(group)
        if known is None:
            return None
        try:
            return known[1].clone()
        except (AttributeError, RuntimeError):
            # An older torch, or a store without connections.
            return known[1]

    @staticmethod
    def issued(group: Any) -> int | None:
        """Return how many collectives `group` has issued, where its backend counts."""
        try:
            return int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):
            return None


def loaded() -> ModuleType | None:
    """Return the module `C10D` if this process has imported it, and it is complete."""
    module = sys.modules.get(C10D)
    return module if hasattr(module, "destroy_process_group") else None


def probe(c10d: ModuleType) -> Names:
    """Return the private names of the torch that `c10d` belongs to."""
    version = str(sys.modules["torch"].__version__)
    names = Names(c10d, version)
    for sentence in _missing(names):
        names.missing.append(f"torch {version} has no {sentence}")
    return names


def _missing(names: Names) -> Iterator[str]:
    library = sys.modules.get("torch._C._distributed_c10d")
    # Before it recorded gloo as well, its name was that of NCCL.
    names.dump = getattr(library, "_dump_fr_trace", None) or getattr(
        library, "_dump_nccl_trace", None
    )
    if names.dump is None:
        yield "_dump_fr_trace: what torch issues by itself, as DDP, is not shown"
    registry = names.registry
    for name, without in (
        ("pg_map", "groups are not shown"),
        ("pg_group_ranks", "groups are not shown"),
        ("pg_backend_config", "the backends of groups are not shown"),
    ):
        if not hasattr(registry, name):
            yield f"distributed_c10d._world.{name}: {without}"
    if not hasattr(names.c10d, "_register_process_group"):
        yield "_register_process_group: a new group is shown a moment later"


class RpcNames:
    """The names of torch's RPC, some of them private, that its watch replaces or asks.

    Parameters
    ----------
    rpc
        The module `RPC`, imported.

    Raises
    ------
    AttributeError
        Where this torch lacks one of them: then RPC is not watched.
    """

    def __init__(self, rpc: ModuleType) -> None:
        library: Any = sys.modules["torch._C._distributed_rpc"]
        self.rpc = rpc
        self.api: Any = sys.modules[f"{RPC}.api"]
        #: Here C++ looks for the function that runs the functions of others.
        self.internal: Any = sys.modules[f"{RPC}.internal"]
        self.autograd: Any = sys.modules["torch.distributed.autograd"]
        #: The base class of all futures.
        self.future: Any = sys.modules["torch._C"].Future
        self.rref: Any = library.PyRRef
        self.agent: Any = library.TensorPipeAgent
        for owner, name in (
            (self.rpc, "_init_rpc_backend"),
            (self.api, "_invoke_rpc"),
            (self.api, "_invoke_rpc_builtin"),
            (self.api, "_to_worker_info"),
            (self.api, "_get_current_rpc_agent"),
            (self.api, "_is_current_rpc_agent_set"),
            (self.api, "AllGatherStates"),
            (self.api, "_all_gather_sequence_id"),
            (self.api, "_all_gather_sequence_id_to_states"),
            (self.internal, "_run_function"),
            (self.rref, "_get_future"),
            (self.autograd, "_current_context"),
        ):
            getattr(owner, name)

    @property
    def running(self) -> bool:
        """Whether RPC is initialized."""
        return bool(self.api._is_current_rpc_agent_set())

    def in_autograd_context(self) -> bool:
        """Whether this thread is in a ``torch.distributed.autograd.context``."""
        try:
            self.autograd._current_context()
        except RuntimeError:
            return False
        return True
