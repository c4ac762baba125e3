"""The diagnosis of an op that has timed out, from what the ranks answered."""

from __future__ import annotations

from ..groups.inquiry import ANSWER_WAIT, Answers, Explanation
from ..groups.key import GroupKey
from ..groups.spec import GroupSpec
from .diagnosis import diagnose
from .verdicts import RankView, in_one

__all__ = ["explain"]

_NO_ANSWER = (
    "the group is not made there yet, the process is stopped or holds the GIL, or the "
    "host is out of reach"
)


def explain(spec: GroupSpec, generation: int, answers: Answers) -> Explanation | None:
    """Return why an op of the group did not end; ``None`` if no fault is found.

    Parameters
    ----------
    spec, generation
        The group, and the number of its generation.
    answers
        Group rank → the answer of that rank; see `rankscope.backends.groups.inquiry`.
    """
    views = {}
    groups = {spec.key: generation}
    for place, answer in answers.items():
        rank = spec.ranks[place]
        if answer is None:
            views[rank] = RankView(rank, silent_for=ANSWER_WAIT, silence=_NO_ANSWER)
            continue
        members = answer.pop("groups")
        views[rank] = RankView(rank, **answer)
        for record in answer["records"]:
            key = GroupKey(record["group"], tuple(members[record["group_id"]]))
            if key != spec.key:
                groups[key] = max(groups.get(key, 0), record["generation"])
    verdicts = diagnose(groups, views, stall=0.0)
    text, culprits = in_one(verdicts)
    return Explanation(text, culprits) if text else None
