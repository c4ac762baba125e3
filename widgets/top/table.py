"""RankTable: the rows of a group, of which those in sight alone are drawn.

Each draw of a `DataTable` costs its cells one by one, whether they are in sight or not:
with 64 ranks more of a core than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from rankscope.backends.printable import printable

from ..board.arrange import Item, View, arrange
from ..board.columns import COLUMNS, columns_of, shown_item
from ..board.rows import Cells
from ..tables import GAP, Column, Row, with_widths

__all__ = ["SHAPES", "RankTable"]

#: The mood of a rank → its shape: no colour is needed to read a row.
SHAPES = {"busy": "●", "working": "●", "warning": "▲", "error": "■", "calm": "○"}
#: The longest text of a cell.
_LONGEST = 60


class RankTable(ScrollView, can_focus=True):
    """The rows of one group; the first line has the titles of the columns."""

    DEFAULT_CSS = """
    RankTable { height: 1fr; }
    RankTable > .table--titles { text-style: bold; }
    RankTable > .table--working { color: $primary; }
    RankTable > .table--warning { color: $warning; }
    RankTable > .table--error { color: $error; text-style: bold; }
    RankTable > .table--calm { text-style: dim; }
    RankTable > .table--cursor { text-style: reverse; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"table--{one}"
        for one in ("titles", "working", "warning", "error", "calm", "cursor")
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move_page(-1)", "page up", show=False),
        Binding("pagedown", "move_page(1)", "page down", show=False),
        Binding("home", "move_to(0)", "first", show=False),
        Binding("end", "move_to(-1)", "last", show=False),
        Binding("enter", "open", "Stacks"),
    ]

    class Opened(Message):
        """A row was chosen, by Enter or a click on the row that is chosen."""

        def __init__(self, item: Item) -> None:
            super().__init__()
            self.item = item

    class TitlePressed(Message):
        """The title of a column was clicked."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.view = View()
        self.columns: list[Column] = []
        self._rows: Mapping[int, Cells] = {}
        self._now = 0.0
        #: Seconds by which a status may be old: shorter elapsed times are not shown.
        self.least_shown = 0.0
        self._cursor = 0
        # What the columns have held: they keep their widths while values change.
        self._widths: dict[str, int] = {}
        self._group = ""
        # The rows in sight, by their keys, until the next `show`.
        self._drawn: dict[str, Row] = {}
        self._full: dict[str, int] = {}
        self._base = Style()

    # -- what is shown ------------------------------------------------------

    def show(
        self, group: str, rows: Mapping[int, Cells], now: float, view: View
    ) -> None:
        """Show the rows of the group `group`, as they are at `now`."""
        if group != self._group or view.fold != self.view.fold:
            self._group, self._widths = group, {}
        chosen = self.chosen
        self._rows, self._now, self.view = rows, now, view
        self.items = arrange(rows, view)
        self._drawn = {}
        keys = [item.key for item in self.items]
        if chosen is not None and chosen.key in keys:
            self._cursor = keys.index(chosen.key)
        self._cursor = max(0, min(self._cursor, len(keys) - 1))
        self._fit()
        self.refresh()

    @property
    def chosen(self) -> Item | None:
        return self.items[self._cursor] if self.items else None

    def _visible(self) -> Iterable[Item]:
        first = self.scroll_offset.y
        return self.items[first : first + max(1, self.size.height)]

    def _row(self, item: Item) -> Row:
        row = self._drawn.get(item.key)
        if row is None:
            row = self._drawn[item.key] = self._made(item)
        return row

    def _made(self, item: Item) -> Row:
        row = shown_item(item, self._rows, self._now, self.least_shown)
        texts = {key: printable(text) for key, text in row.texts.items()}
        texts["state"] = f"{SHAPES.get(row.mood, '○')} {texts['state']}"
        if item.fold:
            texts["rank"] = f"{'▾' if item.open else '▸'} {texts['rank']}"
        return replace(row, texts=texts)

    def _fit(self) -> None:
        """Choose the columns that there is room for, by the rows in sight."""
        titles = {one.key: self._title(one) for one in COLUMNS}
        for item in self._visible():
            for key, text in self._row(item).texts.items():
                if text:
                    width = min(cell_len(text), _LONGEST)
                    self._widths[key] = max(self._widths.get(key, 0), width)
        columns = columns_of(self._rows.values())
        columns = [one for one in columns if one.key in self._widths]
        self._full = {
            one.key: max(self._widths[one.key], cell_len(titles[one.key]))
            for one in columns
        }
        self.columns = with_widths(columns, self._full, self._room)
        width = sum(self._full[one.key] + len(GAP) for one in self.columns)
        size = Size(max(0, width - len(GAP)), len(self.items) + 1)
        if size != self.virtual_size:
            self.virtual_size = size

    @property
    def _room(self) -> int:
        """The width that is left beside the scroll bar, which may be yet to come."""
        scrolls = len(self.items) + 1 > self.size.height
        bar = self.styles.scrollbar_size_vertical if scrolls else 0
        return self.size.width - bar

    def _title(self, column: Column) -> str:
        if column.key != self.view.sort:
            return column.title
        return f"{column.title} {'▼' if self.view.descending else '▲'}"

    # -- drawing --------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        # To find it takes as long as to draw half of a line.
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        x, first = self.scroll_offset
        if y == 0:
            segments = self._segments(
                {one.key: self._title(one) for one in self.columns},
                dict.fromkeys((one.key for one in self.columns), "titles"),
            )
        elif first + y - 1 < len(self.items):
            segments = self._row_segments(first + y - 1)
        else:
            segments = []
        rest = self._base
        if y > 0 and self._is_cursor(first + y - 1):
            rest += self._style("cursor")
        strip, end = Strip(segments), x + self.size.width
        if strip.cell_length <= end:
            return strip.crop_extend(x, end, rest)
        # Without a mark "waits for rank 17" may read as "waits for rank 1".
        return Strip([*strip.crop(x, end - 1), Segment("…", rest)])

    def _is_cursor(self, place: int) -> bool:
        return self.has_focus and place == self._cursor and place < len(self.items)

    def _row_segments(self, place: int) -> list[Segment]:
        item = self.items[place]
        row = self._row(item)
        mood = "working" if row.mood == "busy" else row.mood
        styles = {"state": mood}
        if any("awaited" in self._rows[rank] for rank in item.ranks):
            # Where there is no room for the column, the rank alone tells.
            styles |= {"late": "warning", "rank": "warning"}
        if any("blame" in self._rows[rank] for rank in item.ranks):
            styles |= {"verdict": "error", "rank": "error"}
        if self._is_cursor(place):
            # Colours would be backgrounds there.
            return self._segments(row.texts, {}, "cursor")
        return self._segments(row.texts, styles)

    def _segments(
        self, texts: Mapping[str, str], styles: Mapping[str, str], under: str = ""
    ) -> list[Segment]:
        base = self._base
        if under:
            base += self._style(under)
        found = []
        for place, column in enumerate(self.columns):
            if place:
                found.append(Segment(GAP, base))
            text, width = texts[column.key], self._full[column.key]
            style = styles.get(column.key)
            if column.numeric:
                text = " " * (width - cell_len(text)) + text
            found.append(
                Segment(
                    set_cell_size(text, width),
                    base + self._style(style) if style else base,
                )
            )
        return found

    def _style(self, name: str) -> Style:
        """Return the style of a class, without its background."""
        return self.get_component_rich_style(f"table--{name}", partial=True)

    # -- keys and clicks --------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._widths = {}
        self._fit()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Choose the columns by the rows that are in sight now."""
        super().watch_scroll_y(old_value, new_value)
        if self.items:
            self._fit()

    def action_move(self, by: int) -> None:
        self._go_to(self._cursor + by)

    def action_move_page(self, pages: int) -> None:
        self._go_to(self._cursor + pages * max(1, self.size.height - 2))

    def action_move_to(self, place: int) -> None:
        self._go_to(place % max(1, len(self.items)))

    def _go_to(self, place: int) -> None:
        self._cursor = max(0, min(place, len(self.items) - 1))
        top, inside = self.scroll_offset.y, max(1, self.size.height - 1)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + inside:
            self.scroll_to(y=self._cursor - inside + 1, animate=False)
        self.refresh()

    def action_open(self) -> None:
        if self.chosen is not None:
            self.post_message(self.Opened(self.chosen))

    def on_click(self, event: events.Click) -> None:
        """Choose a row, open the chosen one, or sort by a title."""
        x, y = event.x + self.scroll_offset.x, event.y
        if y == 0:
            for column in self.columns:
                width = self._full[column.key] + len(GAP)
                if x < width:
                    self.post_message(self.TitlePressed(column.key))
                    return
                x -= width
            return
        place = self.scroll_offset.y + y - 1
        if place >= len(self.items):
            return
        again = place == self._cursor and event.chain > 1
        self._go_to(place)
        if again:
            self.action_open()
