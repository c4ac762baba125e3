"""The private names of torch's groups and of their registry, each probed.

A name that a version of torch lacks has a sentence in `Names.missing`: what is not
shown without it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

from ..patching import replace

__all__ = [
    "C10D",
    "MAKER",
    "RECORDER_SIZE",
    "REGISTER",
    "SET_DEFAULT",
    "Names",
    "names",
    "probe",
]

#: The module of torch that holds the registry of groups.
C10D = "torch.distributed.distributed_c10d"

#: The variables with the number of entries of torch's Flight Recorder, newest first.
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

#: The function of `C10D` that makes every group but those that are split from another
#: group's communicator. Its result is a tuple, whose first element is the group.
MAKER = "_new_process_group_helper"

#: The function of `C10D` that gives a group its name.
REGISTER = "_register_process_group"

#: The function of `C10D` that sets the default group; to None when all are destroyed.
SET_DEFAULT = "_update_default_pg"

Dump = Callable[[bool, bool, bool], bytes]


@dataclass
class Names:
    """What `probe` found in one version of torch."""

    #: The module `C10D`.
    c10d: ModuleType
    version: str
    #: Torch's Flight Recorder: ``dump(collectives, stacks, only_active)`` returns a
    #: pickle. ``None`` where there is none.
    dump: Dump | None = None
    #: A sentence for each name that this torch lacks.
    missing: list[str] = field(default_factory=list)

    @property
    def registry(self) -> Any:
        """Torch's registry of groups: ``pg_map``, ``pg_group_ranks`` and others."""
        return getattr(self.c10d, "_world", None)

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")[:2]))

    # -- the registry ---------------------------------------------------------------

    def groups(self) -> list[Any]:
        """Return the groups, oldest first, but those whose ops Rankscope does."""
        # A copy: another thread may make a group, or rebuild one.
        found = list(getattr(self.registry, "pg_map", ()))
        return [group for group in found if not hasattr(group, "of_rankscope")]

    def has(self, group: Any) -> bool:
        """Return whether `group` was made here, and not destroyed since."""
        return group in self.registry.pg_map

    @property
    def default(self) -> Any:
        """The default group; ``None`` where there is none."""
        return getattr(self.registry, "default_pg", None)

    @property
    def count(self) -> int:
        """The number that the next group gets as its name."""
        return int(self.registry.group_count)

    @count.setter
    def count(self, count: int) -> None:
        self.registry.group_count = count

    def places(self, group: Any) -> Mapping[int, int] | None:
        """Return rank in `group` by global rank; ``None`` while it is being made."""
        known: Mapping[Any, Mapping[int, int]]
        known = getattr(self.registry, "pg_group_ranks", {})
        return known.get(group)

    def ranks(self, group: Any) -> tuple[int, ...] | None:
        """Return the global ranks of `group`; ``None`` while it is being made."""
        places = self.places(group)
        if places is None:
            return None
        return tuple(sorted(places, key=places.__getitem__))

    def registered_name(self, group: Any) -> str:
        return str(self.registry.pg_names[group])

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

    def backend_name(self, group: Any) -> str:
        return str(self.registry.pg_map[group][0])

    def own_store(self, group: Any) -> Any:
        """Return torch's store of `group`, over the connection that torch uses."""
        return self.registry.pg_map[group][1]

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

    # -- one group --------------------------------------------------------------------

    @staticmethod
    def backends(group: Any) -> dict[str, Any]:
        """Return the backends of `group` by the type of device; each one once."""
        found: dict[str, Any] = {}
        for device in group._device_types:
            backend = group._get_backend(device)
            if not any(backend is one for one in found.values()):
                found[device.type] = backend
        return found

    @staticmethod
    def device_types(group: Any) -> list[str]:
        return [device.type for device in getattr(group, "_device_types", ())]

    @staticmethod
    def options(backend: Any) -> tuple[Any, timedelta | None]:
        """Return the options of `backend` and the timeout among them, else ``None``."""
        options = getattr(backend, "options", None)
        return options, getattr(options, "_timeout", None)

    def timeout(self, group: Any) -> float | None:
        for device in getattr(group, "_device_types", ()):
            _, limit = self.options(group._get_backend(device))
            if limit is not None:
                return limit.total_seconds()
        return None

    @staticmethod
    def issued(group: Any) -> int:
        """Return how many collectives `group` has issued; 0: it counts none."""
        try:
            return int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):
            return 0

    # -- creation -------------------------------------------------------------------

    @property
    def options_argument(self) -> str:
        """The argument of a backend's options of the function that makes groups."""
        known = inspect.signature(getattr(self.c10d, MAKER)).parameters
        return "pg_options" if "pg_options" in known else "backend_options"

    def make(
        self, arguments: Mapping[str, Any], places: Mapping[int, int], *, default: bool
    ) -> Any:
        """Make a group by `arguments` of `MAKER`, and register it with its `places`."""
        with self._without_split(arguments):
            new, _ = getattr(self.c10d, MAKER)(**arguments)
        self.registry.pg_group_ranks[new] = dict(places)
        if default:
            self.c10d._update_default_pg(new)
        return new

    def set_timeout(self, group: Any, timeout: timedelta) -> None:
        self.c10d._set_pg_timeout(timeout, group)

    @contextlib.contextmanager
    def out_of_registry(self, group: Any) -> Iterator[Mapping[int, int]]:
        """Within the block, and after a success, the registry lacks `group`."""
        c10d, registry = self.c10d, self.registry
        places = registry.pg_group_ranks[group]
        tables = [
            registry.pg_map,
            registry.pg_names,
            registry.pg_group_ranks,
            registry.pg_backend_config,
            registry.pg_to_tag,
            registry.pg_coalesce_state,
            # Since torch 2.15: what records a group whose backend does not.
            getattr(registry, "pg_flight_recorder_hooks", {}),
        ]
        kept = [(table, table.pop(group)) for table in tables if group in table]
        tags = [members for members in registry.tags_to_pg.values() if group in members]
        for members in tags:
            members.remove(group)
        is_default = group is registry.default_pg
        if is_default:
            c10d._update_default_pg(None)
        name = group.group_name
        c10d._unregister_process_group(name)
        try:
            yield places
        except BaseException:
            for table, entry in kept:
                table[group] = entry
            for members in tags:
                members.append(group)
            if is_default:
                c10d._update_default_pg(group)
            c10d._register_process_group(name, group)
            raise

    @contextlib.contextmanager
    def _without_split(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Within the block, no group is split: that needs ranks outside of it, too."""
        for name in ("backend_options", "pg_options"):
            options: Any = arguments.get(name)
            if options is not None and hasattr(options, "split_from"):
                options.split_from = None
        if "_get_split_source" not in vars(self.c10d):
            yield
            return
        undo = replace(self.c10d, "_get_split_source", lambda _: lambda _: None)
        try:
            yield
        finally:
            undo()


def names() -> Names:
    """Return the names of the torch of this process, which has imported `C10D`."""
    return probe(sys.modules[C10D])


@functools.cache
def probe(c10d: ModuleType) -> Names:
    """Return the private names of the torch that `c10d` belongs to."""
    version = str(sys.modules["torch"].__version__)
    found = Names(c10d, version)
    for sentence in _missing(found):
        found.missing.append(f"torch {version} has no {sentence}")
    return found


#: What the watch cannot do without a name: of the module `C10D`, of its registry, and
#: of a ``ProcessGroup``.
_USES = {
    MAKER: "groups are not noted when they are made, and not rebuilt",
    REGISTER: "a new group is shown a moment later",
    "_unregister_process_group": "groups are not rebuilt",
    SET_DEFAULT: "groups are not rebuilt, nor kept for the end once destroyed",
    "_set_pg_timeout": "groups are not rebuilt",
}
_REGISTRY_USES = {
    "pg_map": "groups are not shown",
    "pg_group_ranks": "groups are not shown",
    "default_pg": "groups are not shown",
    "pg_backend_config": "the backends of groups are not shown",
    "pg_names": "groups that were made before the watch are not rebuilt",
    "pg_to_tag": "groups are not rebuilt",
    "tags_to_pg": "groups are not rebuilt",
    "pg_coalesce_state": "groups are not rebuilt",
    "group_count": "groups are not rebuilt",
}
_GROUP_USES = {
    "_device_types": "groups are not aborted",
    "_get_backend": "groups are not aborted",
    "_get_sequence_number_for_group": "ops without an entry in the recorder have no "
    "number",
}


def _missing(found: Names) -> Iterator[str]:
    library = sys.modules.get("torch._C._distributed_c10d")
    # Before it recorded gloo as well, its name was that of NCCL.
    found.dump = getattr(library, "_dump_fr_trace", None) or getattr(
        library, "_dump_nccl_trace", None
    )
    if found.dump is None:
        yield "_dump_fr_trace: what torch issues by itself, as DDP, is not shown"
    for owner, prefix, uses in (
        (found.c10d, "distributed_c10d.", _USES),
        (found.registry, "distributed_c10d._world.", _REGISTRY_USES),
        (getattr(found.c10d, "ProcessGroup", None), "ProcessGroup.", _GROUP_USES),
    ):
        for name, without in uses.items():
            if not hasattr(owner, name):
                yield f"{prefix}{name}: {without}"
