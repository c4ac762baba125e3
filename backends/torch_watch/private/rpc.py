"""The private names of torch's RPC."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["RPC", "RpcNames"]

#: The module of torch's RPC.
RPC = "torch.distributed.rpc"


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
        #: Makes the store in which the workers meet.
        self.rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
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
            (self.rendezvous, "TCPStore"),
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
