"""The page *When it hangs*: a section for each verdict, with what it really says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.backends.observe.verdicts import Fault
from tests.backends.observe.hang_scenes import SCENES, scene

PAGE = Path(__file__).resolve().parents[3] / "docs" / "when_it_hangs.md"
SECTIONS: dict[str, str] = dict(
    re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
)


def test_every_verdict_has_a_section() -> None:
    assert {*SCENES} == {*Fault}
    assert {*SECTIONS} - {"The way back"} == {fault.value for fault in Fault}


@pytest.mark.parametrize("fault", SCENES, ids=lambda fault: fault.value)
def test_the_page_quotes_the_verdict(fault: Fault) -> None:
    _, verdict = scene(fault)
    quoted = re.findall(r"```text\n(.*?)\n```", SECTIONS[fault.value], re.DOTALL)
    assert quoted == [str(verdict)]
