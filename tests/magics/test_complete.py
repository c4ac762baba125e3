"""Completion: what may follow, as IPython asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from rankscope.magics import complete
from rankscope.magics.complete import candidates

KINDS: complete.Kinds = {
    "ranks": lambda before: ["0", "1", "2", "3", "all"],
    "group": lambda before: ["default", "tp"],
    "backend": complete._backends,
    "launcher": lambda before: ["local", "mpi", "slurm"],
    "variable": lambda before: ["weights", "x"],
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
        ("%dist_init --backend ", "", ["cpu:", "gloo"]),
        ("%dist_init --backend cpu:", "", ["gloo", "mpi"]),
        ("%dist_init --backend cpu:gloo,", "", ["cuda:"]),
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


def test_a_free_value_is_left_to_others() -> None:
    assert candidates("%dist_init --connection-file ./", 0, KINDS) is None


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


def test_the_body_gets_python(shell: InteractiveShell) -> None:
    code = "%%distributed -r 0\nmy_arr"
    with provisionalcompleter():
        found = [c.text for c in shell.Completer.completions(code, len(code))]
    assert "my_array" in found
