"""Tab completion: options of the magics, values where they are known, and cells.

A custom matcher, not the ``complete_command`` hook, since IPython
cuts words at ``-``, ``,``, ``:`` and ``=``, and the hook sees the last piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profileapp import list_profiles_in
from IPython.paths import get_ipython_dir

from rankscope.backends import Backend
from rankscope.backends.benchmark import BENCHMARKS
from rankscope.backends.interface.registry import builtin_devices
from rankscope.engines.launch.cluster_file import cluster_files
from rankscope.engines.launch.clusters import launcher_names
from rankscope.engines.wire.job_file import job_files

from .cell_code import CellCode, names_on_ranks
from .language.commands import COMMANDS
from .language.options import Command, Option
from .mode import CellMode
from .session import session

__all__ = ["candidates", "kinds_of_values", "matcher"]

_LINE = re.compile(r"\s*(%{1,2})(\w+)\s")

#: Characters in a value after which completion starts again.
_SEPARATORS = {"ranks": ",-", "gpus": ",-", "backend": ",:", "backend_name": ","}

#: The dtypes offered; others may be typed.
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")

#: The backends of torch's default group that are offered; others may be typed.
TORCH_BACKENDS = ("cpu:gloo,cuda:nccl", "gloo", "nccl", "rankscope")

#: The folder of device files.
DEV = Path("/dev")

Kinds = dict[str, Callable[[str], Iterable[str]]]


def matcher(
    shell: InteractiveShell, mode: CellMode
) -> Callable[[CompletionContext], Any]:
    """Return a matcher for `shell`, to be put among its `custom_matchers`."""
    kinds = kinds_of_values(shell)

    @context_matcher(priority=100, identifier="rankscope")  # type: ignore[untyped-decorator]
    def rankscope_matcher(context: CompletionContext) -> SimpleMatcherResult:
        lines = context.full_text.split("\n")[: context.cursor_line]
        above = sum(len(line) + 1 for line in lines)
        cursor = above + context.cursor_position
        cell = CellCode.of(context.full_text, cursor, mode)
        if cell is not None:
            fragment, completions = cell.completions()
            # Else IPython would offer names of the notebook, which ranks do not have.
            completions = completions or [SimpleCompletion(fragment)]
        else:
            found = candidates(context.text_until_cursor, context.cursor_line, kinds)
            if found is None:
                return SimpleMatcherResult(completions=[])
            fragment, words = found
            completions = [SimpleCompletion(word, type="magic") for word in words]
        return SimpleMatcherResult(
            completions=completions,
            matched_fragment=fragment,
            suppress=True,
            ordered=True,
        )

    return rankscope_matcher


def kinds_of_values(shell: InteractiveShell) -> Kinds:
    """Return, for each kind of value, what makes the list of those there are."""
    return {
        "ranks": lambda text: _ranks(),
        "group": lambda text: _groups(),
        "job": lambda text: [
            *(one.address for one in job_files()),
            *(one.cluster_id for one in cluster_files()),
        ],
        "backend": _backends,
        "torch_backend": lambda text: TORCH_BACKENDS,
        "launcher": lambda text: launcher_names(),
        "profile": lambda text: list_profiles_in(get_ipython_dir()),  # type: ignore[no-untyped-call]
        "variable": lambda text: _variables(shell.user_ns),
        "rank_variable": lambda text: names_on_ranks(),
        "cluster": lambda text: [one.cluster_id for one in cluster_files()],
        "benchmark": lambda text: [*BENCHMARKS],
        "backend_name": lambda text: sorted({*builtin_devices(), *Backend.registry}),
        "device": lambda text: ["cpu", "cuda"],
        "dtype": lambda text: DTYPES,
        "gpus": lambda text: _gpus(),
    }


def candidates(line: str, number: int, kinds: Kinds) -> tuple[str, list[str]] | None:
    """Return the incomplete word at the end of `line`, and its completions."""
    match = _LINE.match(line)
    if match is None:
        return None
    command = COMMANDS.get(match[2])
    if command is None or command.cell != (match[1] == "%%"):
        return None
    if command.cell and number:
        return None
    words = line[match.end() :].split(" ")
    word, before = words[-1], [w for w in words[:-1] if w]
    if word.startswith("-") and "=" not in word:
        return _matching(word, _flags(command, before))
    flag, equals, value = word.partition("=")
    if equals and command.option(flag) is not None:
        return _value(command.option(flag), value, kinds)
    option = command.option(before[-1]) if before else None
    if option is not None and option.metavar is not None:
        return _value(option, word, kinds)
    if command.parameter is not None and command.parameter.kind is not None:
        return _of_kind(command.parameter.kind, word, kinds)
    return _matching(word, _flags(command, before))


def _flags(command: Command, before: list[str]) -> list[str]:
    return [
        flag
        for option in command.all_options
        if not any(flag in before for flag in option.flags)
        for flag in option.flags
    ]


def _value(
    option: Option | None, text: str, kinds: Kinds
) -> tuple[str, list[str]] | None:
    if option is None or option.kind == "file":
        return None
    found = None if option.kind is None else _of_kind(option.kind, text, kinds)
    if found is None or not found[1]:
        # The word as typed: without any completion IPython would use its other
        # matchers, which complete magics and files.
        return text, [text]
    return found


def _of_kind(kind: str, text: str, kinds: Kinds) -> tuple[str, list[str]] | None:
    if kind not in kinds:
        return None
    cut = max((text.rfind(mark) for mark in _SEPARATORS.get(kind, "")), default=-1)
    return _matching(text[cut + 1 :], kinds[kind](text[: cut + 1]))


def _matching(word: str, words: Iterable[str]) -> tuple[str, list[str]]:
    return word, [one for one in words if one.startswith(word)]


# -- values ----------------------------------------------------------------------


def _ranks() -> list[str]:
    cluster = session.cluster
    return [] if cluster is None else [*map(str, cluster.ranks), "all"]


def _groups() -> list[str]:
    cluster = session.cluster
    return [] if cluster is None else list(cluster.glance().groups)


def _backends(before: str) -> list[str]:
    """Return devices at the start of a part, backends after the colon."""
    names = {**builtin_devices()}
    names.update((name, one.devices) for name, one in Backend.registry.items())
    if before.endswith(":"):
        device = before[:-1].rpartition(",")[2]
        native = sorted(name for name, where in names.items() if device in where)
        # CUDA arrays can be staged through host memory.
        hosts = [name for name, where in names.items() if "cpu" in where]
        staged = sorted(hosts) if device == "cuda" else []
        return [*native, *(name for name in staged if name not in native)]
    devices = sorted({device for known in names.values() for device in known})
    parts = [f"{device}:" for device in devices]
    return parts if before else [*parts, *sorted(names)]


def _gpus() -> list[str]:
    """Return the GPUs of this host, by their device files."""
    numbers = (path.name.removeprefix("nvidia") for path in DEV.glob("nvidia[0-9]*"))
    return sorted((one for one in numbers if one.isdecimal()), key=int)


def _variables(namespace: dict[str, Any]) -> list[str]:
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in ("In", "Out", "exit", "quit", "open", "get_ipython")
        and not isinstance(value, (type, ModuleType))
    )
