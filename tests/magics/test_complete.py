"""Completion: what may follow, as IPython asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from rankscope.magics import complete
from rankscope.magics.complete import candidates
from rankscope.magics.mode import MODE_CELL

KINDS: complete.Kinds = {
    "ranks": lambda before: ["0", "1", "2", "3", "all"],
    "group": lambda before: ["default", "tp"],
    "backend": complete._backends,
    "torch_backend": lambda before: complete.TORCH_BACKENDS,
    "launcher": lambda before: ["local", "mpi", "slurm"],
    "variable": lambda before: ["weights", "x"],
    "gpus": lambda before: ["0", "1"],
}


@pytest.mark.parametrize(
    ("line", "fragment", "some"),
    [
        ("%%distributed -", "-", ["-r", "--ranks", "--async", "--no-collapse"]),
        ("%%distributed --as", "--as", ["--async"]),
        ("%%distributed ", "", ["-r", "-g", "-t", "--async"]),
        ("%%distributed -r ", "", ["0", "3", "all"]),
        ("%%distributed -r 0,", "", ["0", "3"]),
        ("%%distributed -r 0,2-", "", ["3"]),
        ("%%distributed --ranks=1", "1", ["1"]),
        ("%%distributed -g t", "t", ["tp"]),
        ("%dist_abort de", "de", ["default"]),
        ("%dist_restart ", "", ["0", "all"]),
        ("%dist_init --engines s", "s", ["slurm"]),
        ("%dist_init --backend ", "", ["cpu:", "tcp"]),
        ("%dist_init --backend cpu:", "", ["gloo", "mpi", "tcp", "ucx"]),
        ("%dist_init --backend cpu:tcp,", "", ["cuda:"]),
        ("%dist_init -n 2 --to", "--to", ["--torch"]),
        ("%dist_init --torch ", "", ["gloo", "nccl", "cpu:gloo,cuda:nccl"]),
        ("%dist_init --torch r", "r", ["rankscope"]),
        ("%dist_init --torch=n", "n", ["nccl"]),
        ("%dist_init --torch -", "-", ["-n", "--timeout"]),
        ("%dist_init --devices ", "", ["0", "1"]),
        ("%dist_init --devices 0-", "", ["1"]),
        ("%dist_init -n 4 --ke", "--ke", ["--keep"]),
        ("%dist_push we", "we", ["weights"]),
        ("  %dist_push -", "-", ["-r"]),
    ],
)
def test_what_may_follow(line: str, fragment: str, some: list[str]) -> None:
    found = candidates(line, 0, KINDS)
    assert found is not None
    assert found[0] == fragment
    assert set(some) <= set(found[1])
    assert all(word.startswith(fragment) for word in found[1])


def test_an_option_that_is_there_is_not_offered_again() -> None:
    found = candidates("%%distributed -r 0 --", 0, KINDS)
    assert found is not None
    assert "--ranks" not in found[1]
    assert "--async" in found[1]


@pytest.mark.parametrize(
    "line",
    ["x = 1", "%timeit x", "%%distributed", "%distributed -", "%%dist_init -", "-r "],
)
def test_other_lines_are_left_to_others(line: str) -> None:
    assert candidates(line, 0, KINDS) is None


def test_the_body_of_a_cell_is_left_to_others() -> None:
    assert candidates("%%distributed -", 1, KINDS) is None


def test_a_file_is_left_to_others() -> None:
    assert candidates("%dist_init --connection-file ./", 0, KINDS) is None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("%dist_init -n ", ""),
        ("%dist_init --timeout 3", "3"),
        ("%dist_init --timeout=3", "3"),
        ("%dist_init --engines zzz", "zzz"),
    ],
)
def test_a_value_that_is_not_known_stays_as_it_is(line: str, word: str) -> None:
    # Anything less, and IPython would offer magics and files.
    assert candidates(line, 0, KINDS) == (word, [word])


def test_what_is_staged_for_cuda_comes_after_what_is_made_for_it() -> None:
    found = candidates("%dist_init --backend cpu:tcp,cuda:", 0, KINDS)
    assert found is not None
    assert found[1][0] == "nccl"
    assert {"gloo", "mpi"} <= set(found[1])
    assert len(found[1]) == len(set(found[1]))
    found = candidates("%dist_init --backend cpu:", 0, KINDS)
    assert found is not None
    assert "nccl" not in found[1]


def test_gpus_are_known_by_their_device_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(complete, "DEV", tmp_path)
    assert complete._gpus() == []
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert complete._gpus() == ["0", "2", "10"]


# -- through IPython -------------------------------------------------------------


@pytest.fixture(scope="module")
def shell(ipython: InteractiveShell) -> Iterator[InteractiveShell]:
    ipython.user_ns["my_array"] = [1]
    yield ipython
    del ipython.user_ns["my_array"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%distributed --as", ["--async"]),
        ("%%distributed --no", ["--no-collapse"]),
        ("%dist_init -n 2 --engines slu", ["slurm"]),
        ("%dist_init --backend cpu:gl", ["gloo"]),
        ("%dist_push my_", ["my_array"]),
        # Neither magics nor files.
        ("%dist_init -n 2 --timeout ", [""]),
    ],
)
@pytest.mark.filterwarnings("ignore:`Completer.complete`")
def test_ipython_offers_it(
    shell: InteractiveShell, line: str, expected: list[str]
) -> None:
    _, matches = shell.complete("", line, len(line))
    assert matches == expected


def test_a_front_end_gets_the_place_to_replace(shell: InteractiveShell) -> None:
    code = "%%distributed -r 0 --asy\nprint(rank)"
    offset = len("%%distributed -r 0 --asy")
    with provisionalcompleter():
        found = list(shell.Completer.completions(code, offset))
    assert [(c.start, c.end, c.text) for c in found] == [(19, 24, "--async")]


def test_what_nobody_types_is_not_offered(shell: InteractiveShell) -> None:
    with provisionalcompleter():
        found = [one.text for one in shell.Completer.completions("%dist_", 6)]
    assert "%dist_mode" in found
    assert not [one for one in found if MODE_CELL in one]


def test_the_body_gets_python(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jedi finds nothing where another process writes its cache just then.
    monkeypatch.setattr(shell.Completer, "use_jedi", False)
    code = "%%distributed -r 0\nmy_arr"
    with provisionalcompleter():
        found = [c.text for c in shell.Completer.completions(code, len(code))]
    assert "my_array" in found
