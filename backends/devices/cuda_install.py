"""The installed CUDA version, and the command that installs missing packages."""

from __future__ import annotations

import os

from ..install import pip_install, with_extra

__all__ = ["DRIVER_FILES", "cuda_of_cupy", "for_cuda", "has_driver", "install_command"]

#: Device files of a loaded NVIDIA driver; WSL has ``/dev/dxg``.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
#: One of these files exists where a GPU driver is loaded: NVIDIA's or AMD's.
GPU_DEVICES = (*DRIVER_FILES, "/dev/kfd")


def has_driver() -> bool:
    return any(map(os.path.exists, GPU_DEVICES))


def cuda_of_cupy() -> int | None:
    """Return the CUDA version of the installed cupy wheel, 12 or 13, else ``None``."""
    from importlib import metadata  # takes 15 ms, for a message

    for cuda in (13, 12):
        try:
            metadata.distribution(f"cupy-cuda{cuda}x")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def install_command() -> str:
    """Return the command that installs all packages for arrays on CUDA devices."""
    cuda = cuda_of_cupy()
    if cuda is not None:
        return pip_install(with_extra(f"cuda{cuda}"))
    return f"{pip_install(with_extra('cuda13'))} (CUDA 12: {with_extra('cuda12')})"


def for_cuda(package: str) -> str:
    """Return `package` with the CUDA version of cupy, else with both versions."""
    cuda = cuda_of_cupy()
    if cuda is None:
        return f"{package.format(13)} (CUDA 12: {package.format(12)})"
    return package.format(cuda)
