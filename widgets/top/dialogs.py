"""What lies over the table: a question, a text to read, the list of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from rankscope.backends.printable import printable

from .table import SHAPES

__all__ = ["GroupList", "Question", "Reading"]


class Question(ModalScreen[str]):
    """Asks before something is done; the answer is a key, ``n`` for no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 72; max-width: 100%; height: auto; border: round $error; padding: 0 1;
        background: $surface;
    }
    Question .keys { margin-top: 1; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('n')", "no")]

    def __init__(self, text: str, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._text = text
        self._answers = [*answers, ("n", "no")]

    def compose(self) -> ComposeResult:
        """Make the question, and a line that says what each key means."""
        keys = "   ".join(f"{key}  {text}" for key, text in self._answers)
        with Vertical():
            yield Static(Content(printable(self._text)), id="question")
            yield Static(Content(printable(keys)), classes="keys")

    def key_n(self) -> None:
        """Answer no."""
        self.dismiss("n")

    def on_key(self, event: Any) -> None:
        """Answer with the key; others mean nothing, Enter neither."""
        if event.character in {key for key, _ in self._answers}:
            event.stop()
            self.dismiss(event.character)


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
        """Make the text, with its title in the border."""
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
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close")]

    def __init__(self, groups: Sequence[dict[str, Any]], shown: str) -> None:
        super().__init__()
        self._groups, self._shown = groups, shown

    def compose(self) -> ComposeResult:
        """Make the list; the cursor is at the group that is shown."""
        options = OptionList(*map(_option, self._groups))
        options.border_title = f"{len(self._groups)} groups"
        ids = [one["id"] for one in self._groups]
        options.highlighted = ids.index(self._shown) if self._shown in ids else 0
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Answer with the group that was chosen."""
        self.dismiss(str(event.option_id))


def _option(group: dict[str, Any]) -> Option:
    state = group["verdict"] or group["state"]
    about = " · ".join([group["label"], state, *group["facts"][:1]])
    text = printable(f"{SHAPES.get(group['mood'], '○')} {about}")
    return Option(Content(text), id=group["id"])
