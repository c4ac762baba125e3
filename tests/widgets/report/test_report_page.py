"""The page of a report: what it says, that nothing in it runs, and how large it is."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rankscope.backends.observe.evidence import Evidence, Group
from rankscope.backends.observe.verdicts import Fault, Waiting
from rankscope.backends.post_mortem.evidence_file import EvidenceFile
from rankscope.backends.post_mortem.report import Report
from rankscope.widgets.report.last_ops import last_ops
from rankscope.widgets.report.page import report_page
from rankscope.widgets.report.rank_rows import rank_rows
from tests.widgets.report.report_scenes import EVIL, eight, many, nothing

_VOID = ("meta", "br", "wbr")


class _Text(HTMLParser):
    """The text of the page, and its elements; fails if they do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href"), (name, value)
            assert name != "style" or tag == "svg", value
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        assert not self._open
        return " ".join(filter(None, self.words)).replace(" ,", ",")


def parsed(page: str) -> _Text:
    parser = _Text()
    parser.feed(page)
    return parser


def read(report: Report) -> str:
    return parsed(report_page(report, "dumps", ("Rankscope 0.1.0",))).text


def test_the_verdict_is_first() -> None:
    text = read(eight())
    assert text.index("Missing ranks Rank 5 has not entered") < text.index(" Ranks ")
    for part in (
        "rank 5 at fault, in no op data.py:77 next_batch",
        "rank 0 waits all_reduce #13 default_pg 10 min train.py:88 train_step",
        "ranks 0–4, 6–7",
        "not issued",
        "/job/data.py:77 next_batch in wait of threading.py",
        "it has no line of rank 5: it may be cut",
        "pid 4005 on node00",
        "Rankscope 0.1.0",
    ):
        assert part in text, part


def test_a_deadlock_has_a_picture() -> None:
    report = eight()
    cycle = (
        Waiting((0,), "all_reduce #13", EVIL, (5,)),
        Waiting((5,), "barrier #2", "dp", (0,)),
    )
    verdict = replace(report.verdicts[0], fault=Fault.DEADLOCK, cycle=cycle)
    page = report_page(replace(report, verdicts=(verdict,)), "dumps")
    found = parsed(page)
    assert found.tags.count("svg") == 1
    assert found.tags.count("script") == 1
    assert (
        "2 ranks wait for each other rank 0 waits for rank 5 in all_red" in found.text
    )
    assert "svg" not in parsed(report_page(report, "dumps")).tags


def test_a_page_loads_nothing_and_runs_one_script() -> None:
    page = report_page(many(), "dumps")
    tags = parsed(page).tags
    assert tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "form"} & set(tags)
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import", page)
    # Raw escapes and changes of the direction of text.
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page)


def test_what_files_say_is_text() -> None:
    report = eight()
    file = EvidenceFile(EVIL, EVIL, (1,), '"><img src=x onerror=alert(1)>' + EVIL)
    verdict = replace(report.verdicts[0], text=EVIL, consequences=(EVIL,))
    evil = Report((verdict,), (file,), report.evidence)
    page = parsed(report_page(evil, EVIL, (EVIL,)))
    assert "img" not in page.tags
    assert "<script>document.title" in page.text


def test_alike_ranks_are_one_row() -> None:
    text = read(many())
    alike = "ranks 0–8, 10–511, 520–639, 642–1023"
    assert f"{alike} waits reduce_ scatter_ tensor #42" in text
    assert "rank 517 at fault, raised attention.py:311 forward" in text
    assert "ranks 9, 640–641 no evidence" in text
    assert "1,021 files" in text


def test_a_page_of_many_ranks_is_small() -> None:
    assert len(report_page(many(), "dumps").encode()) < 200_000
    # Where no two ranks are alike.
    report = many()
    group = report.evidence.groups[0]
    ranks = {
        rank: replace(
            report.evidence.ranks[0], rank=rank, called=f"call_{rank} of some/module.py"
        )
        for rank in group.ranks
    }
    different = Report((), report.files, Evidence(ranks, (group,), len(ranks)))
    page = report_page(different, "dumps")
    assert len(page.encode()) < 2_000_000
    assert "1,000 more rows" in parsed(page).text


def test_nothing_hangs() -> None:
    assert "Nothing hangs, as far as what was read tells." in read(nothing())
    empty = Report((), (), Evidence({}))
    assert "What was read does not tell whether an op hangs." in read(empty)


def test_the_ops_around_the_hang() -> None:
    (ops,) = last_ops(eight().evidence)
    assert list(ops.columns) == [*range(6, 14)]
    cells = {ranks: row[-1].word for ranks, row in ops.rows}
    assert cells == {(0, 1, 2, 3, 4, 6, 7): "waits", (5,): "not issued"}


def test_another_op_of_the_same_number_is_named() -> None:
    report = eight()
    evidence = report.evidence
    (group,) = evidence.groups
    one = evidence.ranks[3]
    known = one.groups[group]
    ops = (*known.ops[:-1], replace(known.ops[-1], op="broadcast"))
    other = replace(one, groups={group: replace(known, ops=ops)})
    ranks = {**evidence.ranks, 3: other}
    (found,) = last_ops(replace(evidence, ranks=ranks))
    assert [row[-1].other for ranks, row in found.rows if ranks == (3,)] == [
        "broadcast"
    ]
    text = read(Report((), (), replace(evidence, ranks=ranks)))
    assert "waits broadcast" in text


def test_a_group_without_a_name_or_an_op() -> None:
    evidence = Evidence({}, (Group("", (0, 1)),), 2)
    assert last_ops(evidence) == []
    assert [row.ranks for row in rank_rows(evidence, ())] == [(0, 1)]


@pytest.mark.parametrize("name", ["report.css", "report.js"])
def test_a_file_of_the_page_is_in_the_package(name: str) -> None:
    from rankscope.widgets.report import page

    assert (Path(page.__file__).parent / "page" / name).is_file()
