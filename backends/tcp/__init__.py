"""The tcp backend: the host engine, over sockets and the memory of other ranks."""
