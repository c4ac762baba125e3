"""The docstrings of the public names: their sections, and examples that run."""

from __future__ import annotations

import ast
import doctest
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpydoc.validate import validate

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.groups.world import world
from rankscope.backends.interface.registry import builtin_devices
from tests.public_names import exported, public

#: numpydoc's errors that count: a section is missing, or does not fit the signature.
#: Its others are matters of style, of which the linter has charge.
ERRORS = {
    *("GL06", "GL07", "GL08", "SS01", "YD01"),
    *("PR01", "PR02", "PR03", "PR04", "PR06", "PR07", "RT01", "RT03"),
}
#: What numpydoc cannot see: an Enum's signature, and c10d's ``Backend("GLOO")``.
WITHOUT_PARAMETERS = ("Backend",)

#: Examples on two ranks.
TWO = (
    *("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list"),
    *("refuse_pickles", "send", "send_object_list", "shrink_group"),
)
#: Examples that start processes.
STARTING = ("Cluster", "gloo_info", "GlooInfo")
#: They need a script of torchrun and a notebook: tests/with_torch and tests/magics.
NOT_RUN = ("Job", "load_ipython_extension")

PUBLIC = public()
EXPORTED = exported()


def parsed(name: str, member: Any) -> doctest.DocTest:
    (found,) = (
        test
        for test in doctest.DocTestFinder(recurse=False, exclude_empty=False).find(
            member, name, globs={"dist": dist, "np": np}
        )
    )
    return found


#: The methods that have an example, but for those that inherit its docstring.
METHODS = {
    name: member
    for name, member in {
        **PUBLIC,
        "DeviceMesh.__getitem__": dist.DeviceMesh.__getitem__,
    }.items()
    if "." in name
    and name.split(".")[0] in ("DeviceMesh", "ProcessGroup", "Store", "Work")
    and "\nExamples\n--------\n" in (inspect.getdoc(member) or "")
}
TESTS = {name: parsed(name, one) for name, one in {**EXPORTED, **METHODS}.items()}
ALONE = [name for name in TESTS if name not in (*TWO, *STARTING, *NOT_RUN)]


def described_by_the_class(name: str) -> set[str]:
    """Return the parameters that docstrings of the class of `name` describe.

    They stand before the colon of an entry: ``size : int`` or ``- `key`, `keys`: ...``.
    """
    found = set[str]()
    for one in getattr(EXPORTED[name.split(".")[0]], "__mro__", ()):
        for line in (one.__doc__ or "").splitlines():
            entry = re.match(r" *(?:- )?((?:[`*]*\w+`?, )*[`*]*\w+`?) ?:", line)
            found |= set(re.findall(r"\w+", entry[1])) if entry else set()
    return found


def counts(name: str, code: str, text: str) -> bool:
    """Return whether an error of numpydoc is one, with what classes say for all.

    A class describes once the parameters that many of its methods have, and says that
    its ops return a Work; a summary "Return the size" is the section of the result.
    """
    member = PUBLIC[name]
    function = getattr(member, "__func__", member)
    if code == "PR01":
        missing = set(re.findall(r"'\**(\w+)'", text))
        return not missing <= described_by_the_class(name)
    if code == "RT01":
        is_op = "." in name and function.__annotations__.get("return") == "Work"
        return not is_op and not (inspect.getdoc(function) or "").startswith("Return ")
    return code in ERRORS


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_has_its_sections(name: str) -> None:
    member = PUBLIC[name]
    if "." in name and getattr(member, "__func__", member).__doc__ is None:
        assert inspect.getdoc(member)  # that of the method which it overrides
        return
    exempt = set[str]()
    if name in WITHOUT_PARAMETERS or (
        inspect.isclass(member) and issubclass(member, enum.Enum)
    ):
        exempt.add("PR01")
    if isinstance(member, property):
        exempt |= {"RT01", "RT03"}
    errors = validate(f"rankscope.{name}")["errors"]
    found = [
        text
        for code, text in errors
        if code in ERRORS - exempt and counts(name, code, text)
    ]
    assert not found


@pytest.mark.parametrize("name", PUBLIC)
def test_what_the_code_raises_is_documented(name: str) -> None:
    member = PUBLIC[name]
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    raised = [
        ast.unparse(node.exc)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    # A method that a subclass defines raises nothing itself.
    raises = any(one != "NotImplementedError" for one in raised)
    said = inspect.getdoc(function) or ""
    assert not raises or "\nRaises\n------\n" in said or said.startswith("Raise ")


@pytest.mark.parametrize("name", EXPORTED)
def test_there_is_an_example(name: str) -> None:
    text = inspect.getdoc(EXPORTED[name]) or ""
    assert "\nExamples\n--------\n" in text
    assert bool(TESTS[name].examples) is (name not in NOT_RUN)


@pytest.fixture
def _registry_stays() -> Iterator[None]:
    names = {*dist.Backend.registry, *builtin_devices()}
    yield
    for name in {*dist.Backend.registry} - names:
        del dist.Backend.registry[name]


def run(name: str) -> str:
    """Run the example of `name`; return doctest's report of what failed."""
    report: list[str] = []
    doctest.DocTestRunner().run(TESTS[name], out=report.append)
    return "".join(report)


@pytest.mark.usefixtures("_registry_stays")
@pytest.mark.parametrize("name", ALONE)
def test_the_example_runs_on_one_rank(name: str) -> None:
    # An example of what begins with the group makes it.
    if not any(".init_pro" in step.source for step in TESTS[name].examples):
        store = dist.HashStore()
        dist.init_process_group("tcp", store=store, rank=0, world_size=1)
    try:
        assert run(name) == ""
    finally:
        if world.default is not None:
            world.destroy()


def both(me: Rank) -> dict[str, str]:
    """Run the examples of two ranks on one of them; return what failed, by name."""
    dist.init_process_group("tcp")
    found = {}
    for name in TWO:
        found[name] = run(name)
        me.meet(name)
    dist.destroy_process_group()
    return {name: failed for name, failed in found.items() if failed}


@pytest.mark.processes
def test_the_examples_run_on_two_ranks() -> None:
    assert run_ranks(2, both) == [{}, {}]


@pytest.mark.processes
@pytest.mark.parametrize("name", STARTING)
def test_the_example_runs_and_starts_what_it_needs(name: str) -> None:
    assert run(name) == ""
