"""The status table: the same words as text and as HTML, for every state."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from rankscope.engines import ClusterStatus, GroupStatus, RankStatus
from rankscope.widgets import StatusTable, status_table
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.text import board_text
from rankscope.widgets.status_table import COLUMNS
from rankscope.widgets.tables import Row, Section
from tests.widgets.statuses import cluster, group, op, rank

# 0.2 s before the rank was last heard of.
WAITING = op(state="started", elapsed=3.04, source="cell 7 line 3")


def sections(status: ClusterStatus) -> list[Section]:
    return status_table.sections(BoardModel.of(status))


def cells(row: Row) -> tuple[str, ...]:
    return tuple(row.texts[column.key] for column in COLUMNS)


def state_of(one: RankStatus) -> tuple[str, str]:
    (section,) = sections(cluster(one))
    (row,) = section.rows
    return row.texts["state"], row.mood


@pytest.mark.parametrize(
    ("one", "state", "mood"),
    [
        (rank(0, group()), "idle", "calm"),
        (rank(0), "idle", "calm"),
        (rank(0, group(), state="busy", busy_for=12.0, cell=7), "in cell 7 · 12 s",
         "busy"),
        (rank(0, group(oldest=WAITING), state="busy"),
         "in all_reduce #14 · 3.2 s · cell 7 line 3", "working"),
        (rank(0, group(oldest=op(state="scheduled", elapsed=0.3))),
         "in all_reduce #14 · 0.5 s", "working"),
        (rank(0, group(state="aborted", reason="by hand")), "aborted", "error"),
        (rank(0, group(), state="dead"), "dead", "error"),
        (rank(0, group(), state="unreachable"), "no answer", "error"),
        (rank(0, group(), heartbeat_age=4.0), "silent", "warning"),
    ],
)  # fmt: skip
def test_every_state_has_a_word_and_a_mood(
    one: RankStatus, state: str, mood: str
) -> None:
    assert state_of(one) == (state, mood)


def test_a_row_has_all_that_is_asked_for() -> None:
    view = group(enqueued=op(seq=16), started=op(seq=15), completed=op("barrier", 14))
    one = rank(2, view, memory=96 << 20, gpu_memory=12 << 30)
    (section,) = sections(cluster(one))
    assert [column.title for column in COLUMNS] == [
        "rank", "host", "pid", "engine", "device", "memory", "GPU memory", "state",
        "enqueued", "started", "completed", "heartbeat",
    ]  # fmt: skip
    assert cells(section.rows[0]) == (
        "2", "node", "4002", "12", "cpu:tcp", "96 MiB", "12 GiB", "idle",
        "#16 all_reduce", "#15 all_reduce", "#14 barrier", "0.2 s",
    )  # fmt: skip


def test_each_group_has_a_section_and_the_engines_stand_in_the_first() -> None:
    tp = group("tp", (0, 1), generation=2)
    status = cluster(rank(0, group(ranks=(0, 1)), tp), rank(1, group(ranks=(0, 1)), tp))
    first, second = sections(status)
    assert (first.title, second.title) == ("default", "tp")
    assert first.facts == ("ranks 0–1", "cpu:tcp", "timeout 30 min")
    assert second.facts[-1] == "generation 2"
    assert cells(first.rows[0])[1:5] == ("node", "4000", "10", "cpu:tcp")
    assert cells(second.rows[0])[1:5] == ("", "", "", "")


def test_groups_of_one_name_on_other_ranks_are_told_apart() -> None:
    low, high = group("dp", (0, 1)), group("dp", (2, 3))
    status = cluster(rank(0, low), rank(1, low), rank(2, high), rank(3, high))
    found = sections(status)
    assert [section.facts[0] for section in found] == ["ranks 0–1", "ranks 2–3"]
    assert [section.title for section in found] == ["dp (0–1)", "dp (2–3)"]


def test_a_dead_rank_and_an_abort_are_explained_below_their_group() -> None:
    gone = group(state="aborted", reason="rank 1 died")
    status = cluster(
        rank(0, gone),
        rank(1, gone, state="dead", reason="rank 1 is dead: killed by SIGKILL"),
    )
    (section,) = sections(status)
    assert section.notes == (
        "aborted on ranks 0–1: rank 1 died",
        "rank 1 is dead: killed by SIGKILL",
    )
    assert "rank 1 dead" in str(StatusTable(status)).splitlines()[0]


def test_one_abort_at_two_times_is_one_note() -> None:
    def gone(time: str) -> GroupStatus:
        return group(state="aborted", reason=f"by hand (at {time})")

    status = cluster(rank(0, gone("10:00:00")), rank(1, gone("10:00:01")))
    (section,) = sections(status)
    assert section.notes == ("aborted on ranks 0–1: by hand (at 10:00:00)",)


def test_a_rank_without_groups_is_seen() -> None:
    status = cluster(rank(0, group()), rank(1, heartbeat_age=None))
    assert [section.title for section in sections(status)] == ["default", "no group"]
    assert cells(sections(status)[1].rows[0])[-1] == "–"


def test_a_process_that_is_not_known_has_no_number() -> None:
    """As of a rank that ended before this process attached."""
    gone = rank(1, state="dead", host="", pid=-1, reason="rank 1 is dead")
    (row,) = sections(cluster(rank(0, group()), gone))[1].rows
    assert "-1" not in cells(row)
    shown = board_text(BoardModel.of(cluster(rank(0, group()), gone)), 140)
    assert "-1" not in shown.split()


def test_the_columns_of_the_text_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    view = group(oldest=WAITING)
    status = cluster(*(rank(number, view) for number in (0, 1, 10)))
    lines = str(StatusTable(status)).splitlines()
    head, rows = lines[2], lines[4:7]
    for name in ("host", "device", "state", "enqueued", "started", "completed"):
        start = head.index(name)
        assert all(row[start - 1] == " " != row[start] for row in rows)
    assert {len(line) for line in (head, lines[3], *rows)} == {len(head)}


@pytest.mark.parametrize(("hosts", "there"), [(("a", "b"), True), (("a", "a"), False)])
def test_a_narrow_terminal_keeps_the_host_where_there_are_several(
    hosts: tuple[str, str], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    view = group(enqueued=op(), started=op(), completed=op())
    status = cluster(*(rank(n, view, host=host) for n, host in enumerate(hosts)))
    titles = str(StatusTable(status)).splitlines()[2].split()
    assert ("host" in titles, "engine" in titles) == (there, False)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.words.append(data.strip())


def test_html_says_what_the_text_says() -> None:
    gone = group(state="aborted", reason="<rank 1 & died>")
    status = cluster(
        rank(0, gone, group("tp", (0,))), rank(1, gone, state="dead", host="<b>")
    )
    bundle = StatusTable(status)._repr_mimebundle_()
    parser = _Text()
    parser.feed(bundle["text/html"])
    assert parser.open == []
    words = " ".join(parser.words)
    for section in sections(status):
        for row in section.rows:
            assert all(cell in words for cell in cells(row))
        assert all(note in words for note in section.notes)
    assert "<b>" in words


def test_colours_come_from_the_theme_with_fallbacks() -> None:
    html = StatusTable(cluster(rank(0, group())))._repr_mimebundle_()["text/html"]
    assert not re.findall(r"var\(--[\w-]+\)", html)
    assert "--jp-" in html


@pytest.mark.parametrize("room", [60, 80, 100, 200])
def test_text_leaves_columns_out_to_fit(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = op("all_reduce", 15, elapsed=9.0, source="cell 7 line 5")
    status = cluster(
        *(rank(n, group(oldest=waits, enqueued=waits, in_flight=1)) for n in range(4))
    )
    monkeypatch.setenv("COLUMNS", str(room))
    lines = str(StatusTable(status)).splitlines()
    assert max(map(len, lines)) <= max(room, 79)
    # What is being done, and by whom, is always there.
    assert "in all_reduce #15" in lines[4]
    assert ("heartbeat" in lines[2]) == (room >= 100)


def test_the_advice_of_the_ranks_stands_below_once() -> None:
    advice = ("its recorder is off: set X=1",)
    status = cluster(rank(0, group(), advice=advice), rank(1, group(), advice=advice))
    bundle = StatusTable(status)._repr_mimebundle_()
    said = "Ranks 0–1: its recorder is off: set X=1"
    assert bundle["text/plain"].splitlines()[-1] == said
    assert bundle["text/html"].count(said) == 1
