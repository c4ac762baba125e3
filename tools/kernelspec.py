"""Write a kernel spec whose kernels lose no request, from the first one on.

``python -m tools.kernelspec FOLDER`` makes ``FOLDER/kernels/python3``, which
Jupyter finds with ``JUPYTER_PATH=FOLDER``. ``%load_ext rankscope`` changes a kernel
in the same way, but it is a cell, which ipykernel 7.0 to 7.3 may leave unread
(`rankscope.engines.wire.ipykernel_private`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from ipykernel.kernelspec import write_kernel_spec

__all__ = ["ARGUMENT", "write"]

#: Of ``ipykernel_launcher``.
ARGUMENT = (
    "--InteractiveShellApp.extra_extensions=rankscope.engines.wire.ipykernel_private"
)


def write(folder: Path, name: str = "python3", python: str = sys.executable) -> None:
    """Write the spec of a kernel of `python`, called `name`, for the data `folder`."""
    write_kernel_spec(
        str(folder / "kernels" / name),
        overrides={
            "argv": [
                *(python, "-m", "ipykernel_launcher"),
                *(ARGUMENT, "-f", "{connection_file}"),
            ],
            "display_name": "Python 3 (ipykernel)" if name == "python3" else name,
        },
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
