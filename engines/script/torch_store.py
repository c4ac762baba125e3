"""The process in which torch's ranks meet: it serves torch's store at MASTER_PORT.

The launcher starts ``python -m rankscope.engines.script.torch_store FD``; FD listens
already. As under torchrun it is not in rank 0, so that it outlives each of the ranks.
"""

from __future__ import annotations

import socket
import sys
from functools import partial

__all__ = ["main"]


def main() -> None:
    """Serve until the end of stdin, which is the end of the launcher."""
    from torch.distributed import TCPStore

    listening = socket.socket(fileno=int(sys.argv[1]))
    host, port = listening.getsockname()[:2]
    serve = partial(
        TCPStore,
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    try:
        store = serve()
    except NotImplementedError:
        # Up to torch 2.7 one over libuv takes no socket that listens already.
        store = serve(use_libuv=False)
    sys.stdin.buffer.read()
    del store


if __name__ == "__main__":
    main()
