"""Docstrings that are completed from tables."""

from __future__ import annotations

import inspect

from rankscope.backends.documentation import complete, complete_methods

GROUP = {"group": "group : str, optional\n    The shared text."}


def test_what_a_docstring_says_itself_is_not_said_twice() -> None:
    def op(x: int, group: object = None, async_op: bool = False) -> None:
        """Do it.

        Parameters
        ----------
        group : str
            A name.
        x : int
            A number.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            Its own text.
        """

    shared = {**GROUP, "async_op": "async_op : bool\n    Whether."}
    errors = {"ValueError": "Shared.", "TypeError": "Shared, too."}
    text = complete(op, shared, errors).__doc__ or ""
    # In the order of the signature, whatever the order of the docstring was.
    assert text.startswith("Do it.\n\nParameters\n----------\nx : int\n    A number.\n")
    assert text.count("group : ") == 1
    assert "The shared text" not in text
    assert "async_op : bool\n    Whether.\n" in text
    assert text.endswith(
        "Returns\n-------\nNone\n\nRaises\n------\nValueError\n    Its own text.\n"
        "TypeError\n    Shared, too.\n"
    )


def test_a_summary_says_what_is_returned() -> None:
    def size() -> int:
        """Return the size; -1: not a member.

        More of it.
        """
        return 1

    assert (complete(size, {}).__doc__ or "").endswith(
        "More of it.\n\nReturns\n-------\nint\n    The size; -1: not a member.\n"
    )


def test_a_function_without_a_docstring_stays_without_one() -> None:
    def op() -> None:
        pass

    assert complete(op, GROUP).__doc__ is None


def test_a_method_gets_the_docstring_of_what_it_overrides() -> None:
    class Base:
        def join(self, group: str) -> None:
            """Join it."""

        def _hidden(self) -> None:
            pass

    class Derived(Base):
        def join(self, group: str) -> None:
            pass

        def alone(self) -> None:
            pass

    for cls in (Base, Derived):
        complete_methods(cls, lambda method: complete(method, GROUP))
    assert inspect.getdoc(Base.join) == (
        f"Join it.\n\nParameters\n----------\n{GROUP['group']}"
    )
    assert Derived.join.__doc__ == Base.join.__doc__
    assert Derived.alone.__doc__ is None
