"""The errors of ranks that did not answer a request, in one line."""

from __future__ import annotations

import re

import pytest

from rankscope.engines import ClusterError
from rankscope.engines.wire.answers import Answers, _format_error


@pytest.mark.parametrize(
    ("errors", "reported"),
    [
        ({1: "no answer within 2 s"}, "rank 1: no answer within 2 s"),
        ({1: "broken", 0: "broken"}, "ranks 0–1: broken"),
        ({0: "broken", 1: "dead"}, "rank 0: broken; rank 1: dead"),
        (
            {0: "send on rank 0: broken", 1: "send on rank 1: broken"},
            "ranks 0–1: send: broken",
        ),
    ],
)
def test_each_cause_is_reported_once(errors: dict[int, str], reported: str) -> None:
    with pytest.raises(ClusterError, match=f"^{re.escape(reported)}$"):
        Answers(errors=errors).all()


@pytest.mark.parametrize(
    ("ename", "evalue", "reported"),
    [
        ("ClusterError", "no GPU: get one", "no GPU: get one"),
        ("DistBackendError", "no NCCL", "no NCCL"),
        ("KeyError", "'x'", "KeyError: 'x'"),
        ("DistError", "", "DistError: "),
    ],
)
def test_errors_of_rankscope_have_no_class_name(
    ename: str, evalue: str, reported: str
) -> None:
    assert _format_error(ename, evalue) == reported
