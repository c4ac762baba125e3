"""What lies over the table: a question, a text to read, the list of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import name_ranks

from .table import SHAPES

__all__ = ["GroupList", "Question", "Reading"]

#: Groups that a question names.
NAMED = 4


class Question(ModalScreen[list[str]]):
    """Asks whether to do `what` to `groups`: the ids of those that are meant.

    `after` is what that means for the ranks. Of several groups, the one that is `shown`
    may be meant alone.
    """

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 72; max-width: 100%; height: auto; border: round $error; padding: 0 1;
        background: $surface;
    }
    Question .keys { margin-top: 1; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,n", "dismiss", "no")]

    def __init__(
        self,
        what: str,
        groups: Sequence[dict[str, Any]],
        after: str,
        shown: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        ranks = sorted({rank for one in groups for rank in one["ranks"]})
        labels = ", ".join(repr(one["label"]) for one in groups[:NAMED])
        if len(groups) > NAMED:
            labels += f" and {len(groups) - NAMED} more"
        named = f"group{'s' * (len(groups) > 1)} {labels}"
        self._text = f"{what.capitalize()} {named} of {name_ranks(ranks)}? {after}"
        # Key → what it means, and the groups.
        self._answers = {"y": (what, [one["id"] for one in groups])}
        if shown is not None and len(groups) > 1 and shown in groups:
            self._answers["o"] = f"only {shown['label']!r}", [shown["id"]]

    def compose(self) -> ComposeResult:
        keys = [f"{key}  {text}" for key, (text, _) in self._answers.items()]
        with Vertical():
            yield Static(Content(printable(self._text)), id="question")
            yield Static(
                Content(printable("   ".join([*keys, "n  no"]))), classes="keys"
            )

    def on_key(self, event: Key) -> None:
        """Answer with the key; others mean nothing, Enter neither."""
        if event.character in self._answers:
            event.stop()
            self.dismiss(self._answers[event.character][1])


class Reading(ModalScreen[None]):
    """A text that may be long: the stacks of ranks, or what the keys do."""

    DEFAULT_CSS = """
    Reading { align: center middle; }
    Reading > VerticalScroll {
        width: 100%; max-width: 110; height: auto; max-height: 100%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    Reading Static { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "close")
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = Content(printable(self._title))
            box.border_subtitle = "Esc closes"
            yield Static(Content(printable(self._text)), id="text")


class GroupList(ModalScreen[str]):
    """The groups, of which one may be chosen: its id is the answer."""

    DEFAULT_CSS = """
    GroupList { align: center middle; }
    GroupList > OptionList {
        width: 100%; max-width: 90; height: auto; max-height: 80%;
        border: round $primary; background: $surface;
    }
    GroupList > OptionList:nocolor > .option-list--option-highlighted {
        text-style: bold underline;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close")]

    def __init__(self, groups: Sequence[dict[str, Any]], shown: str) -> None:
        super().__init__()
        self._groups, self._shown = groups, shown

    def compose(self) -> ComposeResult:
        options = OptionList(*map(_option, self._groups))
        options.border_title = f"{len(self._groups)} groups"
        ids = [one["id"] for one in self._groups]
        options.highlighted = ids.index(self._shown) if self._shown in ids else 0
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(str(event.option_id))


def _option(group: dict[str, Any]) -> Option:
    state = group["verdict"] or group["state"]
    about = " · ".join([group["label"], state, *group["facts"][:1]])
    text = printable(f"{SHAPES.get(group['mood'], '○')} {about}")
    return Option(Content(text), id=group["id"])
