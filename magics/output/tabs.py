"""Displays that differ between ranks: one output with a tab for each rank.

Plain HTML, which a saved notebook keeps: the tabs are radio buttons. A page that is not
trusted loses the style, hides the buttons, and shows all panels with their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rankscope.backends.rank_sets import format_ranks, name_ranks
from rankscope.widgets.display_id import new_display_id
from rankscope.widgets.tables import page_file

from .parse import Bundle

__all__ = ["Panel", "can_be_in_tab", "tabs"]

#: Ranks, and what they have shown.
Panel = tuple[Sequence[int], Sequence[Bundle]]

#: What HTML can hold, in the order in which front ends prefer it.
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_HELD = {"text/html", "image/svg+xml", *_IMAGES, "text/plain"}
#: What front ends show only where there is nothing better.
_LESSER = {"text/markdown", "text/latex", "application/json", "application/pdf"}

#: More tabs than these have the number of their rank alone.
_NAMED = 8


def can_be_in_tab(bundle: Bundle) -> bool:
    """Whether HTML can hold what a front end would show of `bundle`."""
    better = set(bundle.data) & _HELD - {"text/plain"}
    others = set(bundle.data) - _HELD
    # Text alone is shown as lines, with labels.
    return bundle.display_id is None and bool(better) and others <= _LESSER


def tabs(panels: Sequence[Panel]) -> dict[str, str]:
    name = new_display_id()
    inputs, shown = [], []
    for place, (ranks, bundles) in enumerate(panels):
        label = name_ranks(ranks) if len(panels) <= _NAMED else format_ranks(ranks)
        inputs.append(
            f'<input hidden="hidden" type="radio" name="{name}" id="{name}-{place}"'
            f'{"" if place else " checked"} aria-label="{name_ranks(ranks)}">'
            f'<label hidden="hidden" for="{name}-{place}">{label}</label>'
        )
        content = "".join(map(_content, bundles))
        shown.append(
            f'<div class="panel"><p class="who">{name_ranks(ranks)}</p>{content}</div>'
        )
    selected = ",".join(
        f".{name} > input:nth-of-type({place}):checked ~ .panel:nth-of-type({place})"
        for place in range(1, len(panels) + 1)
    )
    return {
        "text/plain": "\n".join(_text(ranks, bundles) for ranks, bundles in panels),
        "text/html": (
            f'<div class="rankscope-tabs {name}" data-lm-suppress-shortcuts="true">'
            f"<style>{page_file('tabs.css')}{selected} {{ display: block; }}</style>"
            f"{''.join(inputs)}{''.join(shown)}</div>"
        ),
    }


def _text(ranks: Sequence[int], bundles: Sequence[Bundle]) -> str:
    return "\n".join([f"{name_ranks(ranks)}:", *(one.text for one in bundles)])


def _content(bundle: Bundle) -> str:
    data = bundle.data
    for mime in ("text/html", "image/svg+xml"):
        if mime in data:
            return f"<div>{_joined(data[mime])}</div>"
    for mime in _IMAGES:
        if mime in data:
            size = "".join(
                f' {name}="{escape(str(value), quote=True)}"'
                for name, value in bundle.metadata.get(mime, {}).items()
                if name in ("width", "height")
            )
            code = _joined(data[mime]).replace("\n", "")
            alt = escape(str(data.get("text/plain", "figure")), quote=True)
            return f'<div><img src="data:{mime};base64,{code}" alt="{alt}"{size}></div>'
    return f"<pre>{escape(bundle.text)}</pre>"


def _joined(value: Any) -> str:
    """Return the text of a mime type, which may come as a list of lines."""
    return value if isinstance(value, str) else "".join(value)
