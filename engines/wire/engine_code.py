"""Code that an engine evaluates: calls of the functions in `engines.agent`."""

from __future__ import annotations

from typing import Any

__all__ = ["call_of"]


def call_of(module: str, function: str, *arguments: Any) -> str:
    """Return the expression that calls a function of `engines.agent.MODULE`.

    The `arguments` are passed by their repr. It is an expression, so that nothing is
    left in the namespace of the cells.
    """
    given = ", ".join(map(repr, arguments))
    path = f"rankscope.engines.agent.{module}"
    return f"__import__({path!r}, fromlist=[{function!r}]).{function}({given})"
