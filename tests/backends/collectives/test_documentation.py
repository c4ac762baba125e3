"""The docstrings of the public ops: every parameter, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.collectives import coalescing, objects
from rankscope.backends.collectives.documentation import documented
from rankscope.backends.work.op_type import OpType
from tests.backends.store_backend import StoreBackend

OPS = [op.value for op in OpType if op.spec.arguments is not None]
#: What is made of ops.
MADE = [
    name
    for name in (*objects.__all__, *coalescing.__all__)
    if inspect.isfunction(getattr(dist, name)) and name != "refuse_pickles"
]
#: Those that one rank alone can run.
EXAMPLES = [name for name in (*OPS, *MADE) if not re.search("send|recv", name)]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The default group, of one rank."""
    dist.Backend.register_backend("store", StoreBackend, devices="cpu")
    dist.init_process_group(
        "cpu:store", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
    del dist.Backend.registry["store"]


@pytest.mark.parametrize("name", [*OPS, *MADE, "isend", "irecv"])
def test_every_parameter_and_section_is_documented(name: str) -> None:
    function = getattr(dist, name)
    text = inspect.getdoc(function) or ""
    sections = ["Parameters", "Raises"]
    if name != "coalescing_manager":
        sections += ["Notes"]
    if name not in ("send", "coalescing_manager") and "object" not in name:
        sections += ["Returns"]
    if name in EXAMPLES:
        sections += ["Examples"]
    for section in sections:
        assert f"\n{section}\n{'-' * len(section)}\n" in text, section
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^(\w+, )?{parameter}(, \w+)? : ", text, re.M), parameter


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("one_rank")
def test_the_example_runs(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(dist, name), name, globs={"dist": dist, "np": np}
    )
    assert example.examples
    results = doctest.DocTestRunner().run(example)
    assert results.failed == 0


def test_what_a_docstring_says_itself_is_not_said_twice() -> None:
    def op(x: int, group: object = None, async_op: bool = False) -> None:
        """Do it.

        Parameters
        ----------
        x : int
            A number.
        group : str
            A name.

        Returns
        -------
        None
        """

    text = documented(op).__doc__ or ""
    assert text.startswith("Do it.\n\nParameters\n----------\nx : int\n    A number.\n")
    assert text.count("group : ") == 1
    assert "async_op : bool" in text
    assert text.count("Returns\n-------\nNone\n\nRaises\n------\n") == 1


def test_a_function_without_a_docstring_stays_without_one() -> None:
    def op() -> None:
        pass

    assert documented(op).__doc__ is None
