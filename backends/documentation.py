"""Docstrings in numpydoc's form, of which many functions share parts.

A parameter that many functions have is described once, in a table; so are the errors
that all of them raise. Written out in each docstring, these descriptions would differ
soon, and hide what a function has of its own. ``help(dist.all_reduce)``, Jupyter's
``dist.all_reduce?`` and the site show the complete docstring.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["complete", "complete_methods", "documented_waits"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

#: Headers of entries (``name : type`` or an error's class) → their descriptions.
Entries = Mapping[str, str]

_ORDER = (
    *("Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes"),
    "Examples",
)
_TIMEOUT = {
    "timeout": """\
timeout : float, optional
    Seconds to wait at most."""
}
_HEADING = re.compile(rf"^({'|'.join(_ORDER)})\n-+\n", re.MULTILINE)
_SUMMARY = re.compile(r"Return (.+?)(?=\n\n|\Z)", re.DOTALL)


def complete(
    function: F,
    parameters: Mapping[str, str],
    raises: Entries | None = None,
    returns: str = "",
    notes: str = "",
) -> F:
    """Complete the docstring of a function or class; return `function`.

    What the docstring itself says of a parameter or an error goes before the shared
    text. Parameters are put in the order of the signature.

    Parameters
    ----------
    function : callable
        A function without a docstring (``python -OO``) stays without one.
    parameters : mapping of str to str
        Name of a parameter → its entry, which begins with ``name : type``.
    raises : mapping of str to str, optional
        Class of an error → when it is raised.
    returns : str, optional
        The entry under *Returns*. Where it is missing, and the summary begins with
        "Return", the summary is the entry, with the type of the annotation.
    notes : str, optional
        A paragraph that ends the *Notes*.
    """
    if function.__doc__ is None:
        return function
    start, *rest = _HEADING.split(inspect.cleandoc(function.__doc__))
    sections = {
        title: text.rstrip() for title, text in zip(rest[::2], rest[1::2], strict=True)
    }
    signature = inspect.signature(function)
    sections["Parameters"] = _parameters(
        sections.get("Parameters", ""), signature, parameters
    )
    own = _entries(sections.get("Raises", ""))
    shared = {
        error: f"{error}\n{_indented(text)}"
        for error, text in (raises or {}).items()
        if error not in own
    }
    sections["Raises"] = "\n".join([*own.values(), *shared.values()])
    if "Yields" not in sections:
        returns = returns or _returns(start, signature.return_annotation)
        sections.setdefault("Returns", returns)
    if notes:
        sections["Notes"] = "\n\n".join(filter(None, [sections.get("Notes"), notes]))
    blocks = [
        f"{title}\n{'-' * len(title)}\n{sections[title]}"
        for title in _ORDER
        if sections.get(title)
    ]
    function.__doc__ = "\n\n".join([start.rstrip(), *blocks]) + "\n"
    return function


def complete_methods(cls: C, completed: Callable[[Callable[..., Any]], object]) -> C:
    """Call `completed` with every public method of `cls` that has a docstring.

    A method without one, which overrides a documented method, gets the docstring of
    that method: ``help`` finds it by itself, tools that read ``__doc__`` do not.
    """
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__doc__ is None:
            overridden = getattr(super(cls, cls), name, None)
            # Not that of None, which has one since Python 3.14.
            function.__doc__ = None if overridden is None else overridden.__doc__
        else:
            completed(function)
    return cls


def documented_waits(cls: C) -> C:
    """Describe the `timeout` of the methods of a class that wait for its end."""
    return complete_methods(cls, lambda method: complete(method, _TIMEOUT))


def _parameters(
    own: str, signature: inspect.Signature, shared: Mapping[str, str]
) -> str:
    """Return the section of the parameters, in the order of `signature`."""
    entries = _entries(own)
    place = {name: number for number, name in enumerate(signature.parameters)}
    described = {
        name.strip().lstrip("*"): header
        for header in entries
        for name in header.partition(" :")[0].split(",")
    }
    for name in signature.parameters:
        if name not in described and name in shared:
            entries[name] = shared[name]
            described[name] = name
    first = {
        header: min(place.get(name, len(place)) for name in names)
        for header, names in _inverse(described).items()
    }
    return "\n".join(entries[header] for header in sorted(first, key=first.__getitem__))


def _inverse(described: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, header in described.items():
        names.setdefault(header, []).append(name)
    return names


def _entries(section: str) -> dict[str, str]:
    """Return the entries of a section by their headers, the lines at its margin."""
    found: dict[str, str] = {}
    header = ""
    for line in section.splitlines():
        if line and not line[0].isspace():
            header = line
            found[header] = line
        else:
            found[header] += f"\n{line}"
    return {header: text.rstrip() for header, text in found.items()}


def _returns(start: str, annotation: Any) -> str:
    """Return the entry of what a function returns, from its summary; or ``""``."""
    match = _SUMMARY.match(start)
    if match is None or annotation in (inspect.Signature.empty, "None", None):
        return ""
    # "Return the size; -1: not a member" describes the value in all its parts.
    said = match[1][0].upper() + match[1][1:]
    return f"{annotation}\n{_indented(said)}"


def _indented(text: str) -> str:
    """Return `text` as the description of an entry: filled, four spaces in."""
    return textwrap.fill(
        " ".join(text.split()), 84, initial_indent=" " * 4, subsequent_indent=" " * 4
    )
