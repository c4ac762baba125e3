"""Tests of groups of torch that a rank is making just now."""

from __future__ import annotations

import pytest

from rankscope.backends.groups import remedies
from rankscope.backends.groups.abort_reason import AbortReason
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.torch_watch import unfinished
from rankscope.backends.torch_watch.unfinished import UnfinishedGroup


@pytest.mark.parametrize(
    ("in_notebook", "together", "dead", "remedy"),
    [
        (False, False, True, "start the script again"),
        (True, False, False, "make it usable again with %dist_rebuild"),
        (True, False, True, "start it again with %dist_restart, then %dist_rebuild"),
        (True, True, True, "start all ranks again with %dist_restart all"),
    ],
)
def test_the_error_of_an_abort_says_what_helps_here(
    monkeypatch: pytest.MonkeyPatch,
    in_notebook: bool,
    together: bool,
    dead: bool,
    remedy: str,
) -> None:
    monkeypatch.setattr(remedies, "_in_notebook", in_notebook)
    monkeypatch.setattr(remedies, "_restarts_together", lambda: together)
    monkeypatch.setattr(unfinished, "disconnect", lambda store: True)
    group = UnfinishedGroup(GroupKey("dp", (0, 1)), 0, {"store": None}, None)
    remedy_here = remedies.in_torch(dead=dead)
    group.abort(AbortReason("rank 1 is stuck", "rank 1", remedy=remedy_here))
    assert str(group.error()).endswith(f"; {remedy}")
