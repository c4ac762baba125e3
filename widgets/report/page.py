"""The page: one HTML file that loads nothing, for a person who reads a bug report."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankscope import __version__
from rankscope.backends.observe.evidence import Evidence
from rankscope.backends.observe.late_findings import late_lines
from rankscope.backends.observe.lateness import findings_of
from rankscope.backends.post_mortem.evidence_file import EvidenceFile
from rankscope.backends.post_mortem.report import Report
from rankscope.backends.rank_sets import group_by, name_ranks

from ..absence_graph import in_fold, picture_of
from ..lateness_text import COLUMNS, late_rows
from .last_ops import Cell, GroupOps, last_ops
from .markup import fold, mark, op_name, prose, ranks_html, text
from .rank_rows import RankRow, all_ranks, line_of_op, rank_rows

__all__ = ["made_with", "report_page", "write_page"]

_FOLDER = Path(__file__).parent / "page"
#: Rows of a table and groups of ops that are shown at once; others are in a fold.
_ROWS = 24
_GROUPS = 4
#: Groups and rows that the page has at all.
_MOST_GROUPS = 40
_MOST_ROWS = 1200


def report_page(report: Report, title: str, facts: Sequence[str] = ()) -> str:
    """Return the page as HTML; it loads nothing, and no text in it is a script."""
    style = (_FOLDER / "report.css").read_text(encoding="utf-8")
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}'"
    )
    evidence, verdicts = report.evidence, report.verdicts
    culprits = {rank for one in verdicts for rank in one.culprits}
    waiting = {rank for one in verdicts for rank in one.waiting}
    groups = [one.group.name for one in verdicts]
    body = "".join(
        (
            _head(report, title),
            "<main>",
            *_verdicts(report),
            _ranks(rank_rows(evidence, culprits, waiting), evidence),
            _late(report),
            _ops(last_ops(evidence, groups)),
            _places(evidence),
            _files(report.files),
            "</main>",
            f"<footer>{' · '.join(map(text, facts))}</footer>",
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Rankscope report: {text(title, 80)}</title>"
        f"<style>{style}</style></head><body>{body}<script>{script}</script>"
        "</body></html>\n"
    )


def write_page(report: Report, title: str, path: str | os.PathLike[str]) -> None:
    """Write the page of a report, which says when and with what it was made."""
    page = report_page(report, title, made_with())
    Path(path).write_text(page, encoding="utf-8")


def made_with() -> tuple[str, ...]:
    """Return when a report is made, and with what: `facts` of `report_page`."""
    made = time.strftime("made %Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return made, f"Rankscope {__version__}", f"Python {sys.version.split()[0]}"


def _head(report: Report, title: str) -> str:
    about = f"{text(title)} · {_count(len(all_ranks(report.evidence)), 'rank')}"
    about += f" · {_count(len(report.files), 'file')}"
    return (
        f"<header><b>Rankscope report</b><span>{about}</span>"
        '<button type="button" hidden>Unfold all</button></header>'
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _verdicts(report: Report) -> Iterable[str]:
    if not report.verdicts:
        recorded = any(one.recorded for one in report.evidence.ranks.values())
        said = "Nothing hangs, as far as what was read tells."
        if not recorded:
            said = "What was read does not tell whether an op hangs."
        mood = "fine" if recorded else "open"
        yield f'<section class="verdict {mood}"><h1>{said}</h1></section>'
    for one in report.verdicts:
        listed = "".join(f"<li>{prose(item, 1000)}</li>" for item in one.consequences)
        more = f"<ul>{listed}</ul>" if listed else ""
        kind = one.fault.value.capitalize()
        said = one.text[:1].upper() + one.text[1:]
        mood = "" if one.culprits else " open"
        picture = in_fold(picture_of(one), bool(one.cycle))
        yield (
            f'<section class="verdict{mood}"><p class="kind">{text(kind)}</p>'
            f"<h1>{prose(said, 2000)}</h1>{picture}{more}"
            "</section>"
        )


# -- ranks -----------------------------------------------------------------------

_RANK_COLUMNS = ("Ranks", "State", "Op", "Group", "Waited", "Line", "More")


def _ranks(rows: Sequence[RankRow], evidence: Evidence) -> str:
    # Few ranks have a row each: a reader looks for one of them.
    if len(all_ranks(evidence)) <= _ROWS // 2:
        rows = [
            row._replace(ranks=(rank,), processes=_own(row.processes, rank))
            for row in rows
            for rank in row.ranks
        ]
        rows = sorted(rows, key=lambda row: (row.doing.mood != "error", row.ranks))
    titles, cells = _used(_RANK_COLUMNS, [_rank_cells(row) for row in rows])
    lines = [
        _row(row.doing.mood, titles, of)
        for row, of in zip(rows[:_MOST_ROWS], cells, strict=False)
    ]
    notes = ""
    if len(rows) > _MOST_ROWS:
        notes = f'<p class="quiet">{len(rows) - _MOST_ROWS:,} more rows left out</p>'
    return _section("Ranks", _folded(titles, lines, "rows") + notes, _moods(rows))


def _used(
    titles: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return the columns that have a text, as without start times all are empty."""
    used = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    return (
        [titles[place] for place in used],
        [[row[place] for place in used] for row in rows],
    )


def _own(processes: Iterable[str], rank: int) -> tuple[str, ...]:
    return tuple(one for one in processes if one.startswith(f"rank {rank}: "))


def _moods(rows: Sequence[RankRow]) -> str:
    """Return ``1 at fault, 7 wait``."""
    words = {"error": "at fault", "warning": "ended", "working": "waiting"}
    words |= {"quiet": "in no op", "unknown": "not known"}
    counts = dict.fromkeys(words, 0)
    for row in rows:
        counts[row.doing.mood] += len(row.ranks)
    return ", ".join(f"{n:,} {words[mood]}" for mood, n in counts.items() if n)


def _rank_cells(row: RankRow) -> list[str]:
    doing = row.doing
    word = f"at fault, {doing.state}" if doing.mood == "error" else doing.state
    detail = text(doing.detail)
    if len(row.processes) == 1 and len(row.ranks) == 1:
        process = row.processes[0].removeprefix(f"rank {row.ranks[0]}: ")
        detail += (
            f"{'<br>' if detail else ''}<span class='nowrap'>{text(process)}</span>"
        )
    elif row.processes:
        listed = "<br>".join(map(text, row.processes))
        detail += fold("processes", f'<p class="list" tabindex="0">{listed}</p>')
    return [
        ranks_html(row.ranks),
        mark(doing.mood, word),
        f'<span class="mono">{op_name(doing.op)}</span>' if doing.op else "",
        text(doing.group, 100),
        f'<span class="nowrap">{text(row.waited)}</span>' if row.waited else "",
        f'<span class="mono">{text(doing.line)}</span>' if doing.line else "",
        detail,
    ]


def _row(mood: str, titles: Sequence[str], cells: Sequence[str]) -> str:
    classes = {"Group": "group", "More": "detail", "Problem": "problem"}
    classes["File"] = "file"
    parts = []
    for title, cell in zip(titles, cells, strict=True):
        tag = "th" if title == "Ranks" and title == titles[0] else "td"
        kind = f' class="{classes[title]}"' if title in classes else ""
        scope = ' scope="row"' if tag == "th" else ""
        # The label is what a narrow page shows before the cell.
        inside = f"<div>{cell}</div>" if cell else ""
        parts.append(f'<{tag}{scope}{kind} data-label="{title}">{inside}</{tag}>')
    blamed = ' class="error"' if mood == "error" else ""
    return f"<tr{blamed}>{''.join(parts)}</tr>"


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    return _grid(titles, rows, table=' class="stacked"')


def _grid(
    titles: Iterable[str], rows: Iterable[str], scroll: str = "scroll", table: str = ""
) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        f'<div class="{scroll}" tabindex="0"><table{table}><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _folded(titles: Sequence[str], rows: Sequence[str], noun: str) -> str:
    """Return a table of the first rows, and one of the others in a fold."""
    shown = _table(titles, rows[:_ROWS])
    rest = rows[_ROWS:]
    if not rest:
        return shown
    return shown + fold(f"{len(rest):,} more {noun}", _table(titles, rest))


def _section(title: str, body: str, about: str = "") -> str:
    more = f' <span class="quiet">{about}</span>' if about else ""
    return f"<section><h2>{title}{more}</h2>{body}</section>" if body else ""


# -- who kept the others waiting --------------------------------------------------


def _late(report: Report) -> str:
    shown = [
        f"<p>{prose(one, 1000)}</p>" for one in late_lines(findings_of(report.late))
    ]
    if report.verdicts and not shown:
        # What hangs is what a reader looks for.
        return ""
    for group in report.late[:_GROUPS]:
        count = max(one.of for one in group.ranks.values())
        ranks = name_ranks(group.key.ranks)
        about = f"{text(ranks, 60)}, {_count(count, 'collective')}"
        rows = [
            "".join(f"<td>{text(row.texts[column.key])}</td>" for column in COLUMNS)
            for row in late_rows(group)
        ]
        shown.append(
            f'<h3>{text(group.key.name, 200)} <span class="quiet">{about}</span></h3>'
            + _grid((one.title for one in COLUMNS), (f"<tr>{one}</tr>" for one in rows))
        )
    about = "in ops that are over, as far as it was recorded since when a rank waits"
    return _section("Who kept the others waiting", "".join(shown), about)


# -- the last ops ----------------------------------------------------------------


def _ops(groups: Sequence[GroupOps]) -> str:
    # Groups that are done with all they have issued are for those who look for them.
    first = sum(one.hangs for one in groups[:_GROUPS]) or 1
    shown = [_group(one) for one in groups[:first]]
    rest = groups[first:_MOST_GROUPS]
    if rest:
        shown.append(
            fold(_count(len(rest), "more group"), "".join(_group(one) for one in rest))
        )
    left = len(groups) - _MOST_GROUPS
    if left > 0:
        shown.append(f'<p class="quiet">{left:,} more groups are left out</p>')
    about = "by sequence number: the clocks of two ranks cannot be compared"
    return _section("Last ops", "".join(shown), about)


def _group(one: GroupOps) -> str:
    ops = (f"#{n}<small>{op_name(name)}</small>" for n, name in one.columns.items())
    rows = (
        f'<tr><th scope="row">{ranks_html(ranks)}</th>'
        f"{''.join(f'<td>{_cell(cell)}</td>' for cell in cells)}</tr>"
        for ranks, cells in one.rows[: 2 * _ROWS]
    )
    left = len(one.rows) - 2 * _ROWS
    more = f'<p class="quiet">{left:,} more rows are left out</p>' if left > 0 else ""
    return (
        f'<h3>{text(one.group.name, 200)} <span class="quiet">'
        f"{text(name_ranks(one.group.ranks), 60)}</span></h3>"
        f"{_grid(('Ranks', *ops), rows, 'scroll ops')}{more}"
    )


def _cell(cell: Cell) -> str:
    kind = f"{cell.kind} other" if cell.other else cell.kind
    other = f"<small>{op_name(cell.other)}</small>" if cell.other else ""
    return f'<span class="cell {kind}">{cell.word}{other}</span>'


# -- lines and files -------------------------------------------------------------


def _places(evidence: Evidence) -> str:
    """Return where ranks are, those at one line together."""
    at: dict[tuple[str, str], list[int]] = {}
    for rank, one in evidence.ranks.items():
        line, more = one.location or line_of_op(one), one.called or ""
        if more:
            more = f"in {more}"
        if one.exception is not None:
            line, more = one.exception_line or line, f"raised {one.exception}"
        if line is not None:
            place = f"{line.file}:{line.line} {line.function}".strip()
            at.setdefault((place, more), []).append(rank)
    # The fewest ranks first: it is they that differ.
    items = [
        f"<div><dt>{ranks_html(ranks)}</dt>"
        f'<dd><span class="mono">{text(place)}</span> '
        f'<span class="quiet">{text(more)}</span></dd></div>'
        for (place, more), ranks in sorted(at.items(), key=lambda one: len(one[1]))
    ]
    shown = f'<dl class="places">{"".join(items[:_ROWS])}</dl>' if items else ""
    if items[_ROWS:]:
        rest = f'<dl class="places">{"".join(items[_ROWS:_MOST_ROWS])}</dl>'
        shown += fold(f"{len(items) - _ROWS:,} more lines", rest)
    return _section("Where the ranks are", shown, "the user's innermost line")


_FILE_COLUMNS = ("File", "What it is", "Ranks", "Problem")


def _files(files: Sequence[EvidenceFile]) -> str:
    if len(files) > _ROWS:
        groups = [*group_by(files, lambda one: (one.kind, one.problem)).values()]
    else:
        groups = [[one] for one in files]
    # What has a problem is what a reader looks for.
    groups.sort(key=lambda one: (not one[0].problem, one[0].ranks, one[0].path))
    folder = os.path.commonpath([os.path.dirname(one.path) for one in files] or [""])
    rows = []
    for alike in groups:
        paths = [
            text(os.path.relpath(one.path, folder or "."))
            for one in sorted(alike, key=lambda one: (one.ranks, one.path))
        ]
        name = f'<span class="mono">{paths[0]}</span>'
        if len(alike) > 1:
            listed = "<br>".join(paths[:_MOST_ROWS])
            name = fold(
                _count(len(alike), "file"),
                f'<p class="list mono" tabindex="0">{listed}</p>',
            )
        kind = alike[0].kind
        ranks = sorted({rank for one in alike for rank in one.ranks})
        rows.append(
            (
                name,
                "not known" if kind == "other" else text(kind),
                ranks_html(ranks) if ranks else "",
                text(alike[0].problem, 1000),
            )
        )
    titles, cells = _used(_FILE_COLUMNS, rows)
    lines = [_row("", titles, row) for row in cells]
    return _section(
        "Files", _folded(titles, lines, "files") if rows else "", text(folder)
    )
