"""Tests of groups of torch that a rank is making just now."""

from __future__ import annotations

import pytest

from rankscope.backends.groups.abort_reason import AbortReason
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.torch_watch import aborting
from rankscope.backends.torch_watch.unfinished import UnfinishedGroup


def test_the_error_in_a_script_names_no_magic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborting, "hint", "start the script again")
    group = UnfinishedGroup(GroupKey("dp", (0, 1)), 0, {"store": None}, None)
    group.reason = AbortReason("rank 1 is stuck", "rank 1")
    assert str(group.error()).endswith("; start the script again")
