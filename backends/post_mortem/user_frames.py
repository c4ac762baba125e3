"""Which frame of a stack of another process is the user's, by its file alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..observe.evidence import SourceLine
from .source_lines import MOST_CALLERS, is_library

__all__ = [
    "LONGEST",
    "MOST",
    "Frame",
    "library_name",
    "position",
    "rank_in_name",
    "waits_for_threads",
]

#: The most frames of a stack that are kept, and characters of a line that are read:
#: a pattern takes long for a line that somebody has made for it.
MOST = 500
LONGEST = 4096

#: Parts of a path below which code is installed, not written by the user.
_INSTALLED = re.compile(
    r"/(?:lib(?:64)?/python\d[^/]*/)?(?:site|dist)-packages/"
    r"|/lib(?:64)?/python\d[^/]*/|^<frozen |^<string>"
)
#: Files of Python itself, and of this package.
_NOBODYS = re.compile(
    r"/lib(?:64)?/python\d[^/]*/(?!(?:site|dist)-packages/)|^<frozen |(?:^|/)rankscope/"
)
#: Packages that py-spy shows without the folder that they are installed in.
_LIBRARIES = frozenset(
    (
        *("PIL", "accelerate", "aiohttp", "apex", "boto3", "botocore", "cv2"),
        *("deepspeed", "diffusers", "flash_attn", "fsspec", "h5py", "huggingface_hub"),
        *("jax", "lightning", "lightning_fabric", "numpy", "pandas", "peft"),
        *("pyarrow", "pytorch_lightning", "rankscope", "ray", "requests", "s3fs"),
        *("safetensors", "scipy", "sklearn", "torch", "torchcomms", "torchdata"),
        *("torchvision", "transformer_engine", "transformers", "triton", "trl"),
        *("urllib3", "vllm", "wandb", "webdataset", "xformers", "zarr"),
    )
)
#: Stands between the user's line and the op of torch that it calls.
_WRAPPER = "torch/distributed/c10d_logger.py"
#: Rankscope's own frames between an op of torch, or the making of a group, and its
#: library, and those in which a rank waits while its report is written.
_OWN = re.compile(
    r"(?:^|/)backends/(?:torch_watch/(?:calls|creation|errors|unfinished|watch)"
    r"|hang_report/(?:reporter|triggers))\.py$"
)
#: The folders of this package where it runs from a checkout, as its ranks do then.
_CHECKOUT = tuple(
    f"{Path(__file__).parents[2]}/{room}/"
    for room in ("backends", "engines", "magics", "rankscope", "widgets")
)
#: It has the ops, which people call by the name of their package.
_C10D = "torch/distributed/distributed_c10d.py"
#: It calls the debugger at a line with `breakpoint()`, and at those after it.
_DEBUGGER = (" of bdb.py", " of pdb.py")
#: Torch's hook for an exception that has ended the script: no line of it runs.
_AFTER_THE_END = "_distributed_excepthook"
_RANK = re.compile(r"(?<![a-z])rank[ _.=-]?(\d{1,6})(?!\d)", re.IGNORECASE)


class Frame(NamedTuple):
    """One call of a stack: where it stands, and in which function."""

    file: str
    line: int
    function: str
    #: Whether it is the outermost call of its thread.
    outermost: bool = False

    @property
    def is_users(self) -> bool:
        """Whether the code is the user's: neither installed nor Python's own."""
        file = self.file.replace("\\", "/")
        if _INSTALLED.search(file) or not self.line or file.startswith(_CHECKOUT):
            return False
        if file.startswith("/"):
            return not is_library(file)
        # py-spy shows a path from the package on; a script may be called `queue.py`.
        top = file.partition("/")[0].removesuffix(".py")
        if self.function == "<module>" and self.outermost and "/" not in file:
            return True
        return top not in _LIBRARIES and top not in sys.stdlib_module_names


def position(frames: Sequence[Frame]) -> tuple[SourceLine | None, str | None]:
    """Return the user's innermost line, and what it called: ``wait of threading.py``.

    `frames` begin with the innermost. The line has those that called its function.
    Without a frame of the user's own code, it is the innermost one of a library, which
    is neither Python's nor Rankscope's.
    """
    hooked = any(one.function == _AFTER_THE_END for one in frames[-1:])
    if hooked or waits_for_threads(frames):
        return None, None
    files = [one.file.replace("\\", "/") for one in frames]
    own = [place for place, file in enumerate(files) if _OWN.search(file)]
    frames = frames[own[-1] + 1 :] if own else frames
    frames = [one for one in frames if not one.file.endswith(_WRAPPER)]
    for place, frame in enumerate(frames):
        if frame.is_users:
            inner = frames[place - 1] if place else None
            called = inner and f"{inner.function} of {library_name(inner.file)}"
            if called and called.endswith(_DEBUGGER):
                called = "pdb, the debugger"
            further = () if frame.function == "<module>" else frames[place + 1 :]
            outer = [SourceLine(*one[:3]) for one in further if one.is_users]
            return SourceLine(*frame[:3], tuple(outer[:MOST_CALLERS])), called
    libraries = (one for one in frames if not one.file.startswith(_CHECKOUT))
    first = next((one for one in libraries if not _NOBODYS.search(one.file)), None)
    return first and SourceLine(*first[:3]), None


def waits_for_threads(frames: Sequence[Frame]) -> bool:
    """Return whether the main thread is through its program, and others are not."""
    return any(
        one.function == "_shutdown" and one.file.endswith("threading.py")
        for one in frames[-1:]
    )


def library_name(file: str) -> str:
    """Return the path of a file below the folder that it is installed in."""
    file = file.replace("\\", "/")
    if file.startswith(_CHECKOUT):
        return "rankscope"
    name = _INSTALLED.split(file)[-1] or file
    if file.startswith("<frozen "):
        name = name.removesuffix(">")
    return "torch.distributed" if name == _C10D else name


def rank_in_name(path: str) -> int | None:
    """Return the rank that a file's name, or a folder's above it, states.

    ``rank_3``, ``stack-rank3.txt``, ``rank3/py-spy.txt``; not a number alone, which may
    be a process or a local rank, and not ``local_rank_3``.
    """
    for part in reversed(path.replace("\\", "/").split("/")):
        if "local" in part.lower():
            return None
        found = set(_RANK.findall(part))
        if found:
            return int(found.pop()) if len(found) == 1 else None
    return None
