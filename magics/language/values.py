"""Values of options: parsed, checked, and refused with the reason."""

from __future__ import annotations

import keyword
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from rankscope.backends import BackendConfig
from rankscope.backends.did_you_mean import did_you_mean
from rankscope.backends.rank_sets import name_ranks, parse_runs
from rankscope.engines.launch.clusters import launcher_names
from rankscope.engines.launch.host_names import parse_hosts
from rankscope.engines.launch.slurm import submission
from rankscope.engines.wire.torch_environment import TorchOptions


def count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError("expected a number of ranks, such as 4") from None
    if number < 1:
        raise ValueError("there must be at least 1 rank")
    return number


def hosts(text: str) -> dict[str, int]:
    try:
        return parse_hosts(text)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def slurm(text: str) -> str:
    submission(text)
    return text


def times(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a whole number, such as 20")
    return int(text)


def names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError("expected different names with commas between them")
    return found


def identifier(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError("expected the name of a variable")
    return text


def dtype(text: str) -> str:
    try:
        return np.dtype(text).name
    except TypeError:
        raise ValueError("expected a dtype, such as float32 or int64") from None


def device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise ValueError("expected cpu or cuda")
    return text


def switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("expected on or off")
    return text == "on"


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected seconds, such as 30 or 0.5") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError("expected a number of seconds above 0")
    return value


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError("expected a port, 0-65535")
    return int(text)


def backend(text: str) -> str:
    """Return `text` if it is a `BackendConfig`; its `ValueError` says what is wrong."""
    try:
        BackendConfig(text)
    except ValueError as error:
        # The caller puts the option and its text before the message.
        raise ValueError(str(error).removeprefix(f"backend {text!r}: ")) from None
    return text


def torch_backend(text: str) -> str:
    """Return `text` if it names backends of torch; the `ValueError` says how."""
    try:
        TorchOptions.parse(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"torch={text!r}: ")) from None
    return text


def trace_path(text: str) -> str:
    """Return a path to write what ranks did to: ``x.json``, or a folder or a prefix."""
    suffix = Path(text).suffix
    if suffix in ("", ".json") or text.endswith("/") or Path(text).is_dir():
        return text
    raise ValueError(
        f"{suffix} is no format that is known: {Path(text).with_suffix('.json')} is a "
        f"trace for Perfetto, {Path(text).with_suffix('')}/ a folder of dumps for "
        "PyTorch's torchfrtrace"
    )


def launcher(text: str) -> str:
    """Return the name of a launcher of ipyparallel's, or of a launcher class."""
    names = launcher_names()
    if "." in text or text.lower() in names:
        return text
    raise ValueError(
        f"no such launcher{did_you_mean(text, names)} (there are {', '.join(names)})"
    )


def parse_ranks(text: str, present: Collection[int], of: str = "cluster") -> list[int]:
    """Return the ranks that `text` names, sorted, each once.

    `text` is ``"all"`` or a comma-separated list of ranks and inclusive runs,
    such as ``"0,2-3"``. `present` are the known ranks, of the cluster or group `of`.
    """
    if text.strip() == "all":
        return sorted(present)
    runs = parse_runs(text, "rank", ", or all")
    for run in runs:
        # The bounds first: 0-999999999 must not be enumerated.
        missing = [rank for rank in (run[0], run[-1]) if rank not in present]
        if not missing:
            missing = [rank for rank in run if rank not in present]
        if missing:
            raise ValueError(
                f"there is no {name_ranks(missing[:1])}; "
                f"the {of} has {name_ranks(present)}"
            )
    return sorted({rank for run in runs for rank in run})
