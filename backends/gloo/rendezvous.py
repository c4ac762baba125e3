"""What the ranks of a group agree on before their side processes connect."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from ..errors import DistBackendError
from ..messaging.network import own_address
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..stores.process_end import host_id

__all__ = ["check_libraries", "choose_address", "meet"]


def meet(
    store: Store,
    rank: int,
    size: int,
    library: str,
    get: Callable[[str], bytes],
    name: Callable[[Sequence[int]], str] = name_ranks,
) -> str:
    """Return the address on which the side process of `rank` is to listen.

    Blocks until all ranks have published theirs; ``get(key)`` waits for a key of the
    store, `name` is what messages call ranks of the group.
    """
    # Ranks share a loopback in one network namespace only.
    own = {"machine": host_id("net"), "address": own_address(store), "library": library}
    store.set(f"host/{rank}", json.dumps(own))
    hosts = [json.loads(get(f"host/{other}")) for other in range(size)]
    check_libraries([host["library"] for host in hosts], name)
    return choose_address(hosts, rank)


def check_libraries(
    libraries: Sequence[str], name: Callable[[Sequence[int]], str] = name_ranks
) -> None:
    """Raise `DistBackendError` if the ranks use different libraries (by rank)."""
    # They have no transport in common: the ranks would wait for each other for ever.
    if len(set(libraries)) > 1:
        users = {
            library: name(
                [rank for rank, other in enumerate(libraries) if other == library]
            )
            for library in sorted(set(libraries))
        }
        raise DistBackendError(
            "the ranks of the group use different gloo libraries: "
            + "; ".join(f"{ranks}: {library}" for library, ranks in users.items())
            + ". Install the same one for all, or set RANKSCOPE_GLOO on every rank"
        )


def choose_address(hosts: Sequence[dict[str, str]], rank: int) -> str:
    """Return where the side process of `rank` listens: loopback if all share a host."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return hosts[rank]["address"]
    if len({host["machine"] for host in hosts}) == 1:
        return "127.0.0.1"
    return hosts[rank]["address"]
