"""Where late ranks are while the others wait for them, by samples of their stacks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.observe.stacks import MAIN, Frame, Stack
from rankscope.engines.observe.lateness import located
from rankscope.engines.observe.profiling import Profile, Sampled
from tests.backends.observe.late_runs import Run

MS = 1_000_000

LOAD = ("data.py", 77, "load", "read()")
PARSE = ("data.py", 80, "load", "parse()")
OTHER = ("train.py", 5, "main", "step()")
CELL = ("Cell In[7]", 4, "<module>", "time.sleep(0.01)")
INSTALLED = ("/usr/lib/python3.12/json/decoder.py", 3, "decode", "")


def _stack(*calls: tuple[str, int, str, str]) -> Stack:
    return Stack(MAIN, tuple(Frame(*one, internal=False) for one in calls))


def _finding(*late: int) -> LateFinding:
    """Return that some of four ranks are 20 ms late each time."""
    run = Run(heavy=0.1).steps(61, lambda n, rank: 20.0 if rank in late else 1.0)
    lateness = Lateness()
    lateness.take(run.dumps())
    (finding,) = lateness.findings()
    assert finding.ranks == late
    return finding


def _sampled(
    finding: LateFinding, rank: int, stacks: Iterable[Stack], every: int = 5
) -> Sampled:
    """Return looks each `every` ms: `stacks` while the others wait, else OTHER."""
    windows = finding.windows[rank]
    first, last = windows[0][0] - MS, windows[-1][1] + MS
    there, course = [*stacks], list[tuple[int, Stack]]()
    for at in range(first, last + every * MS, every * MS):
        waits = any(begin <= at <= end for begin, end in windows)
        course.append((at, there[len(course) % len(there)] if waits else _stack(OTHER)))
    return Sampled(1.0, len(course), [], course)


def _said(finding: LateFinding, profile: Profile) -> str:
    (one,) = located([finding], profile)
    assert str(one) == str(finding) + (
        f"; meanwhile {one.meanwhile}" * bool(one.meanwhile)
    )
    return one.meanwhile


@pytest.mark.parametrize(
    ("stacks", "said"),
    [
        ([_stack(CELL)], "cell 7 line 4: time.sleep(0.01)"),
        ([_stack(OTHER, LOAD, INSTALLED)], "data.py line 77: read()"),
        ([_stack(OTHER, LOAD), _stack(OTHER, PARSE)], "data.py in load"),
    ],
    ids=["a cell", "what is installed", "two lines of a function"],
)
def test_it_is_at_the_innermost_line_of_the_users(
    stacks: list[Stack], said: str
) -> None:
    finding = _finding(2)
    profile = Profile({2: _sampled(finding, 2, stacks)})
    assert _said(finding, profile) == f"it is at {said}"


def test_several_ranks_are_each_where_they_are() -> None:
    finding = _finding(1, 2)
    at = {
        1: _sampled(finding, 1, [_stack(LOAD)]),
        2: _sampled(finding, 2, [_stack(CELL)]),
    }
    both = "rank 1 is at data.py line 77: read()"
    assert _said(finding, Profile({1: at[1]})) == both
    both += ", rank 2 is at cell 7 line 4: time.sleep(0.01)"
    assert _said(finding, Profile(at)) == both
    same = {rank: _sampled(finding, rank, [_stack(LOAD)]) for rank in (1, 2)}
    assert _said(finding, Profile(same)) == "they are at data.py line 77: read()"


def test_it_is_not_known_where_samples_do_not_tell() -> None:
    finding = _finding(2)
    assert _said(finding, Profile({})) == ""
    assert _said(finding, Profile({2: Sampled(1.0, 0, [])})) == ""
    everywhere = [_stack(one) for one in (LOAD, OTHER, CELL)]
    assert _said(finding, Profile({2: _sampled(finding, 2, everywhere)})) == ""
    assert _said(finding, Profile({2: _sampled(finding, 2, [Stack(MAIN, ())])})) == ""


def test_it_is_not_known_where_the_sampler_could_not_look() -> None:
    # A call that holds the GIL is between the looks: what they see is beside it.
    finding = _finding(2)
    seen = _sampled(finding, 2, [_stack(LOAD)])
    rare = [
        one
        for number, one in enumerate(seen.course)
        if one[1] == _stack(OTHER) or number % 5 == 0
    ]
    assert any(one[1] == _stack(LOAD) for one in rare)
    assert _said(finding, Profile({2: Sampled(1.0, len(rare), [], rare)})) == ""


def test_looks_that_are_older_or_newer_than_the_ops_do_not_count() -> None:
    finding = _finding(2)
    seen = _sampled(finding, 2, [_stack(LOAD)])
    for shift in (-3_600_000, 3_600_000):
        moved = [(at + shift * MS, stack) for at, stack in seen.course]
        assert _said(finding, Profile({2: Sampled(1.0, 9, [], moved)})) == ""
