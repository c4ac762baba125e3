"""What ranks answer to a request, told in one line."""

from __future__ import annotations

import re

import pytest

from rankscope.engines import ClusterError
from rankscope.engines.wire.channel import Answers, _format_error


@pytest.mark.parametrize(
    ("errors", "told"),
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
def test_each_cause_is_format_error_once(errors: dict[int, str], told: str) -> None:
    with pytest.raises(ClusterError, match=f"^{re.escape(told)}$"):
        Answers(errors=errors).all()


@pytest.mark.parametrize(
    ("ename", "evalue", "told"),
    [
        ("ClusterError", "no GPU: get one", "no GPU: get one"),
        ("DistBackendError", "no NCCL", "no NCCL"),
        ("KeyError", "'x'", "KeyError: 'x'"),
        ("DistError", "", "DistError: "),
    ],
)
def test_our_own_errors_are_sentences(ename: str, evalue: str, told: str) -> None:
    assert _format_error(ename, evalue) == told
