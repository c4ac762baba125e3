"""The banner: the state of the cluster in a sentence; and the cells of a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.backends.rank_sets import brief_members, group_by, name_ranks, tell_ranks

from ..absence_graph import picture_of
from ..units import elapsed_text
from .group import Group, blamed
from .rows import SILENT, Cells, text

__all__ = ["Banner", "banner_of", "verdict_cells"]

#: Seconds for which an op has to be in flight before the banner mentions it:
#: a text that is shown for less time cannot be read.
NOTABLE = 1.0
#: Of ranks that connect: how many have is another number soon.
CONNECTING = 0.5

_SHUT_DOWN = "The ranks were shut down"

#: The verdict cell of a rank that a verdict blames; the banner has the sentence.
_BLAME = {
    Fault.RANK_DEAD: "dead",
    Fault.RANK_NOT_RESPONDING: "no answer",
    Fault.OP_MISMATCH: "other op",
    Fault.ORDER_MISMATCH: "other order",
    Fault.DEADLOCK: "deadlock",
    Fault.ROOT_MISMATCH: "other root",
    Fault.REDUCE_OP_MISMATCH: "other reduce op",
    Fault.DTYPE_MISMATCH: "other dtype",
    Fault.SIZE_MISMATCH: "other size",
    Fault.SPLIT_MISMATCH: "other splits",
    Fault.TAG_MISMATCH: "other tag",
    Fault.RANK_BUSY_ELSEWHERE: "busy elsewhere",
    Fault.MISSING_RANKS: "not entered",
    Fault.EXECUTION_HANG: "hangs",
    Fault.UNDECIDED: "not known",
}
#: That of a rank without the op that the one in a recv or a send waits for.
_LACKS = {"recv": "send missing", "send": "recv missing"}


@dataclass(frozen=True)
class Banner:
    """A title of a word or two, a sentence, and further sentences in `more`.

    `groups` are the ids of the tabs that it is about: that of the cause first. `last`
    is a sentence on a hang that is over, which the user may dismiss. `picture` is who
    waits for whom, as SVG, and `opens` whether it is shown before the user asks.
    """

    mood: str
    title: str
    text: str
    more: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    last: str = ""
    picture: str = ""
    opens: bool = False

    @property
    def sentences(self) -> list[str]:
        """All sentences below each other."""
        return [one for one in (self.text, *self.more, self.last) if one]

    def as_dict(self) -> dict[str, Any]:
        """Return the banner as plain data (JSON-able)."""
        return {**asdict(self), "more": list(self.more), "groups": list(self.groups)}

    def __str__(self) -> str:
        return f"{self.title}: {' '.join(self.sentences)}"


def verdict_cells(verdict: Verdict, over: bool = False) -> dict[int, Cells]:
    """Return rank → the cells of its row for `verdict`; `over`: it was aborted."""
    blame = _BLAME[verdict.fault]
    if verdict.fault is Fault.MISSING_RANKS:
        blame = _LACKS.get(verdict.op, blame)
    found: dict[int, Cells] = {
        rank: {"verdict": blame, **({"blame": 1} if rank in verdict.culprits else {})}
        for rank in blamed(verdict)
    }
    waits = "waited" if over else "waits"
    awaited = defaultdict[int, set[int]](set)
    for one in verdict.waits:
        for rank in one.ranks:
            awaited[rank].update(one.awaited)
    for rank in verdict.waiting:
        if awaited[rank]:
            told = f"{waits} for {name_ranks(awaited[rank])}"
        elif verdict.waits:
            # For a rank that waits itself.
            told = f"{waits} because of {name_ranks(verdict.culprits)}"
        elif verdict.culprits:
            told = f"{waits} for {name_ranks(verdict.culprits)}"
        else:
            told = waits
        found.setdefault(rank, {"verdict": told})
    return found


def banner_of(
    head: Mapping[str, Any],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    now: float,
    late: Sequence[str] = (),
) -> Banner:
    """Return the banner for the worst of what is to be reported, then the advice.

    `late` is which ranks keep the others waiting: advice, where nothing is wrong.
    """
    if head.get("state", "running") != "running":
        when = f" at {head['stopped_at']}" if "stopped_at" in head else ""
        if "ended" in head:
            return Banner("calm", "Ended", _sentence(text(head["ended"], 400)))
        what = "This notebook has detached" if head.get("detached") else _SHUT_DOWN
        return Banner("calm", "Ended", f"{what}{when}.")
    found = (
        (_verdicts(verdicts, groups) if verdicts else None)
        or _dead(head, groups)
        or _aborted(head, groups)
        or _silent(groups)
        or _in_flight(groups, now)
        or _busy(head, groups)
    )
    calm = found.mood in ("calm", "busy", "working")
    told = [text(one, 600) for one in late] if calm else []
    advice = map(_sentence, (*told, *head.get("advice", ())))
    return replace(found, more=(*found.more, *advice), last=_last_hang(groups))


def _verdicts(verdicts: Sequence[Verdict], groups: Sequence[Group]) -> Banner:
    sentences = []
    for verdict in verdicts:
        said, named = text(verdict, 600), _named(verdict.group, groups)
        if named not in said and named != repr(text(verdict.group.name, 60)):
            # Others have its name, too.
            said += f" (group {named})"
        sentences.append(_sentence(said))
    first = verdicts[0]
    title = first.fault.value.capitalize()
    tabs = sorted(
        (group for group in groups if any(one.concerns(group.key) for one in verdicts)),
        key=lambda group: group.key != first.group,
    )
    ids = tuple(group.id for group in tabs)
    found = Banner("error", title, sentences[0], tuple(sentences[1:]), ids)
    return _with_picture(found, first)


def _with_picture(banner: Banner, verdict: Verdict) -> Banner:
    return replace(banner, picture=picture_of(verdict), opens=bool(verdict.cycle))


def _dead(head: Mapping[str, Any], groups: Sequence[Group]) -> Banner | None:
    dead: list[int] = head.get("dead", [])
    if not dead:
        return None
    reasons = {
        rank: str(group.base[rank].get("reason", f"rank {rank} is dead"))
        for group in groups
        for rank in dead
        if rank in group.base
    }
    sentences = [_sentence(reason) for reason in dict.fromkeys(reasons.values())]
    title = "Rank dead" if len(dead) == 1 else "Ranks dead"
    shown = sentences[:3] or [_sentence(f"{name_ranks(dead)} is gone")]
    if "restart" not in head.get("refused", {}):
        shown[-1] += f" Restart replaces {name_ranks(dead)}."
    return Banner("error", title, shown[0], tuple(shown[1:]))


def _aborted(head: Mapping[str, Any], groups: Sequence[Group]) -> Banner | None:
    # That of the cause first.
    found = sorted(
        (group for group in groups if group.aborted),
        key=lambda one: one.hang is None or one.hang[0].group != one.key,
    )
    if not found:
        return None
    told: dict[tuple[str, str], list[str]] = {}
    for group in found:
        ended = group.aborts
        where = f" on {name_ranks(ended)}" if len(ended) < len(group.base) else ""
        first = next(iter(ended.values()))
        # The diagnosis says what the ranks did at its time.
        when = ", before the abort" if first.diagnosis else ""
        one = f"{_named(group.key, groups)}{where}"
        told.setdefault((when, text(first.why, 400)), []).append(one)
    sentences = []
    for (when, why), named in told.items():
        those = f"group{'s' * (len(named) > 1)} {', '.join(named)}"
        sentences.append(_sentence(f"{those}{when}: {why}"))
    sentences += [
        _sentence(text(one, 600)) for group in found for one in group.differences
    ]
    if "rebuild" not in head.get("refused", {}):
        them = "it" if len(found) == 1 else "them"
        sentences[-1] += f" Rebuild makes {them} usable again."
        sentences += _left_running(found)
    ids = tuple(group.id for group in found)
    banner = Banner("error", "Aborted", sentences[0], tuple(sentences[1:]), ids)
    hangs = [group.hang[0] for group in found if group.hang is not None]
    return _with_picture(banner, hangs[0]) if hangs else banner


def _left_running(aborted: Sequence[Group]) -> list[str]:
    """Return a sentence on ranks that an abort leaves in their cells: they compute."""
    ranks: dict[str, set[int]] = {}
    for group in aborted:
        for rank, row in group.base.items():
            if row["state"] == "aborted" and "cell" in row:
                ranks.setdefault(str(row["cell"]), set()).add(rank)
    return [
        f"{name_ranks(those).capitalize()} still {'runs' if len(those) == 1 else 'run'}"
        f" cell {cell}, which an abort does not end: interrupt the kernel."
        for cell, those in ranks.items()
    ]


def _last_hang(groups: Sequence[Group]) -> str:
    """Return why groups hung that were rebuilt since, as a cell's deadline does."""
    found = (group.last_hang for group in groups if group.last_hang is not None)
    for verdict in found:
        return _sentence(f"The last hang, before the rebuild: {text(verdict, 600)}")
    return ""


def _silent(groups: Sequence[Group]) -> Banner | None:
    silent = {
        rank: row["state"]
        for group in groups
        for rank, row in group.base.items()
        if row["state"] in ("silent", "no answer")
    }
    if not silent:
        return None
    # On a host with too much to do a status comes late, and nobody was asked.
    title = "No answer" if "no answer" in silent.values() else "Silent"
    told = tell_ranks(silent, f"has sent no status for more than {SILENT:g} s")
    return Banner("warning", title, _sentence(told))


def _in_flight(groups: Sequence[Group], now: float) -> Banner | None:
    """Name the ranks in the op that is in flight for longest, and the others."""
    oldest: tuple[float, Group, Cells] | None = None
    for group in groups:
        for row in group.base.values():
            if row["mood"] == "working" and "since" in row:
                since = float(row["since"])
                if oldest is None or since < oldest[0]:
                    oldest = since, group, row
    if oldest is None or now - oldest[0] < CONNECTING:
        return None
    since, group, example = oldest
    inside = [
        rank
        for rank, row in group.base.items()
        if row["mood"] == "working"
        and (row.get("op"), row.get("seq")) == (example.get("op"), example.get("seq"))
    ]
    op = " ".join(str(example[key]) for key in ("op", "seq") if key in example)
    named = f" (group {_named(group.key, groups)})" if len(groups) > 1 else ""
    if connected := group.connected(inside):
        size = len(group.ranks)
        told = f"{connected} of {size} ranks have connected, for {op}{named}"
        return Banner("working", "Connecting", _sentence(told))
    if now - since < NOTABLE:
        return None
    clauses = [tell_ranks(inside, f"is in {op}")]

    def doing(rank: int) -> str:
        row = group.base[rank]
        in_op = f"is in {row.get('op', '')} {row.get('seq', '')}".rstrip()
        return in_op if row["mood"] == "working" else f"is {row['state']}"

    outside = group_by(sorted(group.base.keys() - set(inside)), doing)
    clauses += [tell_ranks(ranks, fact) for fact, ranks in outside.items()]
    sentence = ", ".join(clauses[:4]) + named
    limit = example.get("limit")
    hint = f" It fails after {elapsed_text(float(limit))}." if limit else ""
    return Banner("working", "In flight", _sentence(sentence) + hint)


def _busy(head: Mapping[str, Any], groups: Sequence[Group]) -> Banner:
    busy: dict[str, set[int]] = {}
    for group in groups:
        for rank, row in group.base.items():
            if row["mood"] in ("busy", "working"):
                busy.setdefault(str(row.get("cell", "")), set()).add(rank)
    if not busy:
        cell = "" if head.get("script") else " a cell"
        return Banner("calm", "Idle", f"No rank is running{cell}.")
    cells = [f"cell {cell}" for cell in busy if cell]
    ranks = set().union(*busy.values())
    # What is no cell and no script was sent to the engines past Rankscope.
    what = cells[0] if len(cells) == 1 else "cells" if cells else head.get("script")
    told = tell_ranks(ranks, f"runs {what}" if what else "is running")
    return Banner("busy", "Running", _sentence(told))


def _named(key: GroupKey, groups: Sequence[Group]) -> str:
    """Return ``'tp'``; ``'tp (0–1)'`` where another group has the name, as its tab."""
    name = text(key.name, 60)
    if sum(group.key.name == key.name for group in groups) > 1:
        name += f" ({brief_members(key.ranks)})"
    return repr(name)


def _sentence(words: str) -> str:
    """Return `words` with a capital at the start and a full stop at the end."""
    words = words.strip()
    if words[:1].islower():
        words = words[0].upper() + words[1:]
    return words if words.endswith((".", "!", "?", "…")) else f"{words}."
