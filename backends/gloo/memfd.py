"""Anonymous memory that the rank maps and its side process inherits."""

from __future__ import annotations

import mmap
import os

__all__ = ["MappedMemfd"]


class MappedMemfd:
    """A memfd of `nbytes`, mapped into this process; raises `OSError`."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Unmap it; every memoryview of the map must have been released."""
        self.map.close()
        os.close(self.fd)
