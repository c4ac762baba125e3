"""The installed CUDA version, and the command that installs missing packages."""

from __future__ import annotations

from importlib import metadata

__all__ = ["DRIVER_FILES", "cuda_of_cupy", "for_cuda", "install_command"]

#: Device files of a loaded NVIDIA driver; WSL has ``/dev/dxg``.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")

_EXTRA = "'rankscope[cuda{}]'"


def cuda_of_cupy() -> int | None:
    """Return the CUDA version of the installed cupy wheel, 12 or 13, else ``None``."""
    for cuda in (13, 12):
        try:
            metadata.distribution(f"cupy-cuda{cuda}x")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def install_command() -> str:
    """Return the command that installs all packages for arrays on CUDA devices."""
    return f"pip install {for_cuda(_EXTRA)}"


def for_cuda(package: str) -> str:
    """Return `package` with the CUDA version of cupy, else with both versions.

    `package` has one ``{}``, for the major version.
    """
    cuda = cuda_of_cupy()
    if cuda is None:
        return f"{package.format(13)} (CUDA 12: {package.format(12)})"
    return package.format(cuda)
