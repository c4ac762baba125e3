"""Failures: grouped, told in one line, and with one traceback for shared ones."""

from __future__ import annotations

import os

import pytest

from rankscope import backends
from rankscope.backends.groups.remedies import after_abort
from rankscope.engines import RankError
from rankscope.engines.errors import plain
from rankscope.magics.output.failures import (
    CellError,
    CommandError,
    Interrupted,
    brief_lines,
    failure_key,
    failure_of,
    report,
    summary_of,
    tell,
)

TRACE = (
    "\x1b[31m-----\x1b[0m",
    "ValueError   Traceback (most recent call last)",
    "Cell \x1b[32mIn[7], line 3\x1b[0m\n      2 x\n      3 raise",
)


def error(
    rank: int,
    ename: str = "ValueError",
    evalue: str = "bad",
    line: int = 3,
    number: int | None = 2,
) -> RankError:
    """As an op raises it that has `number`; a group that is aborted gives it none."""
    trace = (*TRACE, f"{ename}: {evalue}")
    return RankError(rank, ename, evalue, trace, 7, line, sequence_number=number)


def test_the_line_is_read_from_the_traceback() -> None:
    output = {"ename": "E", "evalue": "v", "traceback": list(TRACE)}
    failure = failure_of(2, output, 7)
    assert (failure.rank, failure.cell, failure.line) == (2, 7, 3)


def test_the_innermost_line_of_the_cell_counts() -> None:
    # It has called g(), of an earlier cell.
    trace = ["Cell In[7], line 9", "Cell In[7], line 2, in f()"]
    trace += ["Cell In[3], line 27, in g()", "File x.py:5"]
    output = {"ename": "E", "evalue": "v", "traceback": trace}
    assert failure_of(0, output, 7).line == 2


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (error(1, evalue="bad"), True),
        (error(1, evalue="bad 17 at 0x7f00ab"), False),
        (error(1, ename="KeyError"), False),
        (error(1, line=4), False),
    ],
)
def test_errors_are_one_if_they_differ_in_numbers_only(
    other: RankError, same: bool
) -> None:
    assert (failure_key(error(0)) == failure_key(other)) is same
    assert failure_key(error(0, evalue="pid 12")) == failure_key(
        error(1, evalue="pid 345")
    )


def test_deaths_with_other_exit_codes_are_told_apart() -> None:
    how = {0: "exit code 1", 1: "exit code 4", 2: "exit code 4", 3: "killed by SIGKILL"}
    died = [
        RankError(rank, "EngineDied", f"{end} (engine {rank}, pid {70 + rank} on vm)")
        for rank, end in how.items()
    ]
    first, second, third = summary_of(died).split("; rank")
    assert first.startswith("rank 0: EngineDied: exit code 1 (")
    assert second.startswith("s 1–2: EngineDied: exit code 4 (")
    assert third.startswith(" 3: EngineDied: killed by SIGKILL (")


def test_what_a_death_has_ended_is_one_error() -> None:
    said = (
        "all_reduce #2 of group 'default' on rank {} (cell 7 line 3): the group was "
        "aborted: rank 3 is dead: killed by SIGKILL (engine 3, pid 73 on vm)"
    )
    errors = [error(rank, "DistAbortedError", said.format(rank)) for rank in range(3)]
    assert len({failure_key(one) for one in errors}) == 1


def test_what_a_rank_alone_did_comes_before_what_its_group_raised() -> None:
    group = error(0, "DistError", "rank 1 has nothing to send: its obj")
    alone = error(1, "TypeError", "obj cannot be pickled")
    assert summary_of([group, alone]).startswith("rank 1: TypeError: obj cannot be")


def test_a_rank_that_is_part_of_the_reason_stays() -> None:
    said = (
        "all_reduce #1 of group 'default' on rank 0 (cell 7 line 3): all_reduce: dtype "
        "float32 on rank 1, float64 on rank 0"
    )
    (line,) = summary_of([error(0, evalue=said)]).splitlines()
    assert "dtype float32 on rank 1, float64 on rank 0" in line
    assert "group 'default' (cell 7" in line


def test_an_abort_is_one_error_wherever_a_rank_was_inside_of_rankscope() -> None:
    def aborted(rank: int, *frames: str) -> RankError:
        ours = [f"File {backends.__path__[0]}/{one}, in f()" for one in frames]
        trace = (*TRACE, *ours, "DistAbortedError: aborted")
        return RankError(rank, "DistAbortedError", "aborted", trace, cell=7, line=3)

    waited = aborted(0, "work/work.py:254")
    issued = aborted(1, "groups/process_group.py:459", "groups/generation.py:239")
    assert failure_key(waited) == failure_key(issued)
    elsewhere = RankError(2, "DistAbortedError", "aborted", ("Cell In[7], line 9",))
    assert failure_key(elsewhere) != failure_key(waited)


def test_a_shared_error_has_one_traceback_and_every_message() -> None:
    text = plain(report([error(0, evalue="got 0"), error(1, evalue="got 1")]))
    assert text.startswith("ranks 0–1\n")
    assert text.count("Cell In[7], line 3") == 1
    assert "[0] ValueError: got 0\n[1] ValueError: got 1" in text


def test_a_message_that_all_share_is_not_listed_again() -> None:
    text = plain(report([error(0), error(1)]))
    assert text.count("bad") == 1


def test_many_messages_are_counted() -> None:
    text = plain(report([error(rank, evalue=f"got {rank}") for rank in range(20)]))
    assert "[7] ValueError: got 7\n… and 12 more" in text


def test_frames_inside_rankscope_are_left_out_below_the_users_line() -> None:
    path = os.path.join(backends.__path__[0], "collectives.py")
    frames = (f"File {path}:80, in all_reduce(…)\n", f"File {path}:9, in check(…)\n")
    failure = RankError(0, "ValueError", "bad", (*TRACE, *frames, "ValueError: bad"))
    text = plain(report([failure]))
    assert "all_reduce" not in text
    assert "… 2 frames inside rankscope" in text
    assert "ValueError: bad" in text


def test_frames_inside_rankscope_are_left_out_of_a_cause() -> None:
    path = os.path.join(backends.__path__[0], "staging.py")
    ours = f"File {path}:54, in staging_for(…)\n"
    direct = "\nThe above exception was the direct cause of the following exception:\n"
    cause = ("ModuleNotFoundError  Traceback\n", ours, "ModuleNotFoundError: no cupy")
    main = (*TRACE, ours, ours, "DistBackendError: no cupy")
    failure = RankError(0, "DistBackendError", "no cupy", (*cause, direct, *main))
    text = plain(report([failure]))
    assert "staging_for" not in text
    assert text.index("… 1 frame inside") < text.index("direct cause")
    assert text.index("direct cause") < text.index("… 2 frames inside rankscope")


def test_frames_inside_rankscope_that_call_the_user_are_shown() -> None:
    path = os.path.join(backends.__path__[0], "backend.py")
    ours = f"File {path}:54, in build(…)\n"
    mine = "Cell In[7], line 9, in create(…)\n"
    failure = RankError(0, "ValueError", "bad", (*TRACE, ours, mine, "ValueError: bad"))
    assert "build" in report([failure])


def test_frames_of_others_and_of_our_own_mistakes_are_shown() -> None:
    frame = "File /home/me/model.py:80, in forward(…)\n"
    foreign = RankError(0, "ValueError", "bad", (*TRACE, frame, "ValueError: bad"))
    assert "forward" in report([foreign])
    path = os.path.join(backends.__path__[0], "collectives.py")
    mistake = (*TRACE, f"File {path}:80, in all_reduce(…)\n", "AttributeError: x")
    assert "all_reduce" in report([RankError(0, "AttributeError", "x", mistake)])


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        ([error(2)], "rank 2: ValueError: bad at cell 7 line 3"),
        ([error(r) for r in range(4)], "ranks 0–3: ValueError: bad at cell 7 line 3"),
        (
            [error(0, evalue="got 0"), error(1, evalue="got 1")],
            "ranks 0–1: ValueError: got 0 (and alike) at cell 7 line 3",
        ),
        (
            [error(0), error(1, ename="KeyError", evalue="'k'", line=5)],
            "rank 0: ValueError: bad at cell 7 line 3; "
            "rank 1: KeyError: 'k' at cell 7 line 5",
        ),
        (
            [error(0, "DistAbortedError"), error(2), error(3, "DistAbortedError")],
            "rank 2: ValueError: bad at cell 7 line 3; ranks 0, 3: op aborted",
        ),
        (
            [error(0, "DistAbortedError", "aborted by hand")],
            "rank 0: DistAbortedError: aborted by hand at cell 7 line 3",
        ),
        ([error(0, "AssertionError", "")], "rank 0: AssertionError at cell 7 line 3"),
        (
            [error(0, "SyntaxError", "invalid syntax (79669.py, line 2)")],
            "rank 0: SyntaxError: invalid syntax at cell 7 line 3",
        ),
        (
            [RankError(1, "EngineDied", "killed by SIGKILL\nmore", cell=7)],
            "rank 1: EngineDied: killed by SIGKILL",
        ),
    ],
)
def test_a_failed_cell_is_told_in_one_line(errors: list[RankError], line: str) -> None:
    assert summary_of(errors) == line


def test_the_line_that_opens_to_a_death_leaves_the_cause_to_the_error() -> None:
    died = error(1, "EngineDied", "killed by SIGABRT; diagnosis: dtypes differ")
    assert brief_lines([[died]]) == [
        "rank 1: EngineDied: killed by SIGABRT at cell 7 line 3"
    ]


def test_the_line_that_opens_to_a_syntax_error_has_no_file() -> None:
    why = f"invalid syntax. {'Maybe you meant something else? ' * 2}"
    failed = error(0, "SyntaxError", f"{why}(2870688529.py, line 2)")
    (line,) = brief_lines([[failed]])
    assert line == f"rank 0: SyntaxError: {why.strip()} at cell 7 line 3"


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (["Cell In[7], line 3\n      2 y\n----> 3     x = 1 / 0"], " `x = 1 / 0`"),
        (
            [
                "Cell In[7], line 3\n----> 3 f()",
                "Cell In[6], line 2, in f()\n--> 2 g()",
            ],
            ", cell 6 line 2 `g()`",
        ),
        (
            [
                "Cell In[7], line 3\n----> 3 fit()",
                "File ~/model.py:88, in fit(x)\n     87 def fit(x):\n---> 88     x.y",
                "File ~/v/lib/python3.12/json/decoder.py:9, in d()\n----> 9 raise",
                f"File {backends.__path__[0]}/some.py:5, in f()\n----> 5 raise",
            ],
            ", model.py:88 `x.y`",
        ),
        (["  Cell In[7], line 3\n    x = = 3\n        ^\nSyntaxError"], " `x = = 3`"),
        (["Cell In[7], line 3\n      2 x"], ""),
    ],
)
def test_the_users_innermost_line_is_shown(frames: list[str], where: str) -> None:
    trace = ["ValueError   Traceback", *frames, "ValueError: bad"]
    failed = error(2).replaced(traceback=trace)
    said = f"rank 2: ValueError: bad at cell 7 line 3{where}"
    assert summary_of([failed]) == said
    shown = CellError(said, {2: failed})
    assert [plain(one) for one in shown._render_traceback_()] == [f"CellError: {said}"]
    # %tb
    assert "ValueError   Traceback" in map(plain, shown._render_traceback_())


TIMEOUT = (
    "all_reduce #1 of group 'default' on rank {} (cell 7 line 3) was not done 4 s "
    "after it began (the group's timeout): {}. The group was aborted; make it usable "
    "again"
)


def test_a_timeout_is_one_error_whoever_found_its_cause() -> None:
    """The other ranks were told of the cause, in more words."""
    cause = "rank 2 has not entered"
    told = f"{cause}; all_reduce #1 on rank 1 timed out (at 01:37:22, by rank 1)"
    errors = [
        error(rank, "DistTimeoutError", TIMEOUT.format(rank, why))
        for rank, why in ((0, told), (1, cause), (3, told))
    ]
    assert len({failure_key(one) for one in errors}) == 1
    assert plain(report(errors)).count("has not entered") == 1
    assert summary_of(errors, remedy=False) == (
        "ranks 0–1, 3: DistTimeoutError: all_reduce #1 of group 'default' "
        "(cell 7 line 3) was not done 4 s after it began (the group's timeout): "
        "rank 2 has not entered"
    )
    assert summary_of(errors).endswith(". The group was aborted; make it usable again")


def test_the_remedy_of_an_abort_is_said_once() -> None:
    message = (
        "all_reduce #1 of group 'default' on rank {} (cell 7 line 3): the group was "
        f"aborted: requested from the board; {after_abort()}"
    )
    errors = [error(r, "DistAbortedError", message.format(r)) for r in (0, 1)]
    assert summary_of(errors).endswith(after_abort())
    assert summary_of(errors, remedy=False) == (
        "ranks 0–1: DistAbortedError: all_reduce #1 of group 'default' (cell 7 line "
        "3): the group was aborted: requested from the board"
    )


DIAGNOSED = (
    "{} of group 'default' on rank {} (cell 7 line 3): the group was aborted: "
    "rank 1 has not entered {}; abort requested from the board at 18:45:29; "
    f"{after_abort()}"
)


def test_an_abort_is_told_in_lines_and_its_cause_once() -> None:
    errors = [
        error(rank, "DistAbortedError", DIAGNOSED.format(op, rank, "it"))
        for rank, op in ((0, "send #1"), (2, "barrier #2"), (3, "barrier #2"))
    ]
    assert tell(errors, "group 'default' rebuilt").splitlines() == [
        "rank 0: DistAbortedError: send #1 of group 'default' (cell 7 line 3); "
        "ranks 2–3: barrier #2 of group 'default' (cell 7 line 3)",
        "Why: rank 1 has not entered it; abort requested from the board at 18:45:29",
        "Next: group 'default' rebuilt",
    ]
    many = [
        error(rank, "DistAbortedError", DIAGNOSED.format(f"send #{rank}", rank, "x"))
        for rank in range(9)
    ]
    assert "; and 7 more ops\nWhy: " in tell(many, "")


def test_a_reason_without_a_diagnosis_is_the_cause() -> None:
    said = (
        "{} on rank {}: the group was aborted: dtypes differ (at 18:45:29, by rank {})"
    )
    errors = [
        error(rank, "DistAbortedError", said.format("barrier #2", rank, rank))
        for rank in (0, 1)
    ]
    assert tell(errors, "") == (
        "ranks 0–1: DistAbortedError: barrier #2\n"
        "Why: dtypes differ (at 18:45:29, by rank 0)"
    )


def test_of_an_op_that_an_aborted_group_refuses_the_abort_is_told_as_earlier() -> None:
    """By its lack of a number, whatever the name of its group has."""
    said = DIAGNOSED.format("barrier in group 'run #3'", "{}", "all_reduce #2")
    why = (
        "rank 1 has not entered all_reduce #2; abort requested from the board at "
        "18:45:29"
    )
    for number, told in ((None, f"the group was aborted earlier: {why}"), (2, why)):
        errors = [
            error(rank, "DistAbortedError", said.format(rank), number=number)
            for rank in (0, 1)
        ]
        assert tell(errors, "").splitlines()[1] == f"Why: {told}"


def test_a_cause_that_both_ranks_have_found_is_told_once() -> None:
    said = (
        "barrier #2 on rank {0}: the group was aborted: rank {1} sent {2} bytes where "
        "{3} were expected (at 18:45:2{0}, by rank {0})"
    )
    sides = ((0, 1, 40, 32), (1, 0, 32, 40))
    errors = [error(one[0], "DistAbortedError", said.format(*one)) for one in sides]
    assert tell(errors, "").splitlines()[1:] == [
        "Why: rank 1 sent 40 bytes where 32 were expected (at 18:45:20, by rank 0)"
    ]
    # Not what each has found of the other.
    sides = ((0, 1, 40, 32), (1, 0, 48, 32))
    errors = [error(one[0], "DistAbortedError", said.format(*one)) for one in sides]
    assert tell(errors, "").splitlines()[1].count("were expected") == 2


def test_a_timeout_is_told_in_lines() -> None:
    said = TIMEOUT.format(1, "rank 2 has not entered")
    assert tell([error(1, "DistTimeoutError", said)], "").splitlines() == [
        "rank 1: DistTimeoutError: all_reduce #1 of group 'default' (cell 7 line 3) "
        "was not done 4 s after it began (the group's timeout)",
        "Why: rank 2 has not entered",
    ]
    # The rank that was aborted by it has been told the same, and whose op timed out.
    timed_out = f"{TIMEOUT.format(1, 'x').partition(': ')[0]} timed out after 4 s"
    told = f"barrier #2: the group was aborted: rank 2 has not entered; {timed_out}"
    errors = [error(0, "DistAbortedError", told), error(1, "DistTimeoutError", said)]
    for order in (errors, errors[::-1]):
        assert tell(order, "").splitlines()[1:] == ["Why: rank 2 has not entered"]


def test_the_cause_of_a_death_and_of_what_torch_gave_up_has_its_line() -> None:
    died = error(0, "EngineDied", "killed by SIGABRT; diagnosis: dtypes differ")
    assert tell([died, error(1, "DistAbortedError")], "%dist_restart") == (
        "rank 0: EngineDied: killed by SIGABRT at cell 7 line 3; rank 1: op aborted\n"
        "Why: dtypes differ\n"
        "Next: %dist_restart"
    )
    said = "barrier #1 (cell 7 line 3): timed out; diagnosis at 18:45:29: rank 2 is out"
    for other in ("DistTimeoutError", "DistBackendError"):
        failed = [error(0, "DistTimeoutError", said), error(1, other, said)]
        told = tell(failed, "").splitlines()
        assert told[0].count("barrier #1 (cell 7 line 3): timed out") == len(
            {one.ename for one in failed}
        )
        assert told[1:] == ["Why: rank 2 is out"]


def test_a_cell_that_raised_is_told_with_what_is_next() -> None:
    errors = [error(0), error(1, "DistAbortedError")]
    assert tell(errors, "group 'default' rebuilt").splitlines() == [
        "rank 0: ValueError: bad at cell 7 line 3; rank 1: op aborted",
        "Next: group 'default' rebuilt",
    ]


def test_an_error_has_six_lines_at_most_which_end_between_words() -> None:
    for message in ("word " * 400, f"{'who ' * 90}\nWhy: {'why ' * 200}\nNext: this"):
        lines = [plain(one) for one in CellError(message, {})._render_traceback_()]
        # And the one above it, which opens the tracebacks.
        assert len(lines) == 5
        assert all(len(line) <= 100 for line in lines)
        assert {*" ".join(lines).split()} <= {"CellError:", *message.split(), "…"}
    assert lines[-1] == "Next: this"


def test_who_failed_is_not_cut_off_from_what() -> None:
    ends = set()
    for count in range(70, 95):
        said = f"{'w ' * count}w; ranks 2–3: barrier #2 of group 'default'\nWhy: it"
        *_, line, _ = CellError(said, {})._render_traceback_()
        ends.add(line.partition("w; ")[2] or line[-3:])
    assert {"…", "w …", "ranks 2–3: barrier #2 …"} < ends
    assert not ends & {"ranks …", "ranks 2–3: …"}


def test_of_many_errors_the_first_are_told() -> None:
    errors = [error(rank, f"E{rank}") for rank in range(5)]
    errors.append(error(5, "DistAbortedError"))
    assert summary_of(errors) == (
        "rank 0: E0: bad at cell 7 line 3; rank 1: E1: bad at cell 7 line 3; "
        "and 3 more errors; rank 5: op aborted"
    )


def test_an_endless_message_is_cut_and_no_command_in_another() -> None:
    assert len(summary_of([error(0, evalue="x" * 1000)])) < 600
    remedy = f"{'a long story, ' * 20}: pip install 'rankscope[cuda13]'"
    assert remedy in summary_of([error(0, evalue=remedy)])


def test_aborted_ranks_are_one_line() -> None:
    errors = [error(rank, "DistAbortedError") for rank in (0, 1)]
    assert brief_lines([errors]) == ["ranks 0–1: op aborted at cell 7 line 3"]
    # They have the message in other words.
    one, other = errors
    assert brief_lines([[one], [other]]) == brief_lines([errors])
    others = [[error(rank, f"E{rank}")] for rank in range(2, 40)]
    assert brief_lines([errors, *others])[1:] == [
        "rank 2: E2: bad at cell 7 line 3",
        "and 37 more errors",
    ]


def test_a_message_that_names_its_own_rank_is_not_listed_for_each() -> None:
    errors = [error(r, evalue=f"barrier on rank {r}: bad") for r in range(3)]
    assert "[1]" not in plain(report(errors))
    assert summary_of(errors) == (
        "ranks 0–2: ValueError: barrier: bad at cell 7 line 3"
    )


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (CellError("rank 2: boom", {}), "CellError: rank 2: boom"),
        (Interrupted("after 1 s"), "Interrupted: after 1 s"),
        (CommandError("%dist_init", "no"), "%dist_init: no"),
    ],
)
def test_what_was_shown_is_not_followed_by_a_traceback(
    raised: CellError, line: str
) -> None:
    assert [plain(text) for text in raised._render_traceback_()] == [line]


def test_an_interrupt_is_a_keyboard_interrupt() -> None:
    assert isinstance(Interrupted(""), KeyboardInterrupt)
    assert isinstance(CellError("", {}), Exception)
