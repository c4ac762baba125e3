"""Spelling suggestions."""

from __future__ import annotations

import pytest

from rankscope.backends.did_you_mean import did_you_mean


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--asink", "--async"), ("defualt", "default"), ("--rank", "--ranks")],
)
def test_the_closest_word_is_offered(word: str, meant: str) -> None:
    known = ["--async", "--ranks", "--no-collapse", "default", "tp"]
    assert did_you_mean(word, known) == f"; did you mean {meant}?"


def test_nothing_is_offered_where_nothing_is_close() -> None:
    assert did_you_mean("zzz", ["--async", "default"]) == ""
    assert did_you_mean("zzz", []) == ""
