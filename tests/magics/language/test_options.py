"""Command lines: what is read, and the one message for what is wrong."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from rankscope.magics.language.commands import COMMANDS
from rankscope.magics.language.options import SYNOPSIS

INIT = COMMANDS["dist_init"]
CELL = COMMANDS["distributed"]


def refused(name: str, line: str) -> str:
    with pytest.raises(UsageError) as caught:
        COMMANDS[name].parse(line)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-n 4", {"n": 4}),
        ("-n4", {"n": 4}),
        ("-n=4", {"n": 4}),
        ("--ranks 2 --keep", {"n": 2, "keep": True}),
        ("-n 2 --backend cpu:tcp,cuda:nccl", {"backend": "cpu:tcp,cuda:nccl"}),
        ("-n 2 --backend=tcp", {"backend": "tcp"}),
        ("-n 2 --engines slurm", {"engines": "slurm"}),
        ("-n 2 --engines my.own.Launcher", {"engines": "my.own.Launcher"}),
        ("-n 2 --timeout 0.5", {"timeout": 0.5}),
        ("-n 2", {"torch": None}),
        ("-n 2 --metrics 9464", {"metrics": 9464}),
        ("-n 2 --torch", {"torch": True}),
        ("--torch -n 2", {"torch": True, "n": 2}),
        ("-n 2 --torch gloo --keep", {"torch": "gloo", "keep": True}),
        ("-n 2 --torch=cpu:gloo,cuda:nccl", {"torch": "cpu:gloo,cuda:nccl"}),
        ("-n 2 --devices 0,2-3", {"devices": (0, 2, 3)}),
        ("--cluster-id 'with blank'", {"cluster_id": "with blank", "n": None}),
    ],
)
def test_init_is_read(line: str, expected: dict[str, object]) -> None:
    values = INIT.parse(line)
    assert values is not None
    assert {name: values[name] for name in expected} == expected


def test_a_cell_line_is_read() -> None:
    assert CELL.parse("-r 0,2-3 -g tp -t 5 --async --no-collapse") == {
        "ranks": "0,2-3",
        "group": "tp",
        "limit": 5.0,
        "output": None,
        "background": True,
        "apart": True,
        "late": False,
    }
    assert CELL.parse("") == {
        "ranks": None,
        "group": None,
        "limit": None,
        "output": None,
        "background": False,
        "apart": False,
        "late": False,
    }


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("# every rank's cell ends", None),
        ("tp  # one 'group'", "tp"),
        ("tp#1", "tp#1"),
        ("'tp #1'", "tp #1"),
        ('"tp #1" # "', "tp #1"),
        (r"tp\ #1 #", "tp #1"),
        (r"\#1", "#1"),
    ],
)
def test_a_comment_is_left_out(line: str, group: str | None) -> None:
    assert COMMANDS["dist_abort"].parse(line) == {"group": group}


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("dist_init", "-n 0", "-n 0: there must be at least 1 rank"),
        ("dist_init", "-n -3", "-n -3: there must be at least 1 rank"),
        ("dist_init", "-n x", "-n x: expected a number of ranks, such as 4"),
        ("dist_init", "-n 1.5", "-n 1.5: expected a number of ranks"),
        ("dist_init", "-n", "-n needs a value: N, number of ranks to start"),
        ("dist_init", "-n --keep", "-n needs a value"),
        ("dist_init", "-n 2 -n 3", "-n is given twice"),
        ("dist_init", "-n 2 --keep=yes", "--keep takes no value, 'yes' was given"),
        ("dist_init", "4", "unexpected argument '4'; did you mean -n 4?"),
        ("dist_init", "gloo", "unexpected argument 'gloo'\n"),
        ("dist_init", "--world 4", "unknown option --world; did you mean -n 4?"),
        ("dist_init", "--nproc_per_node=4", "did you mean -n 4?"),
        ("dist_init", "--np", "did you mean -n N?"),
        ("dist_init", "-n 2 --backend glue", "unknown backend 'glue'"),
        ("dist_init", "-n 2 --backend cpu:tcp,cpu:mpi", "'cpu' is given twice"),
        ("dist_init", "-n 2 --backend ncll", "--backend ncll: unknown backend 'ncll'"),
        ("dist_init", "-n 2 --torch GLOO", "--torch GLOO: expected a backend of torch "
         "('gloo', 'nccl', 'rankscope')"),
        ("dist_init", "-n 2 --devices 0,x", "--devices 0,x: 'x' is not a GPU"),
        ("dist_init", "-n 2 --devices 0,0", "GPU 0 is given twice"),
        ("dist_init", "-n 2 --devices 1-0", "the run 1-0 is empty; write 0-1"),
        ("dist_init", "-n 2 --backend cpu:", "bad part 'cpu:'"),
        ("dist_init", "-n 2 --backend cpu:tcp,", "bad part ''"),
        ("dist_init", "-n 2 --bakend tcp", "unknown option --bakend; did you mean "
         "--backend?"),
        ("dist_init", "-n 2 --timeout soon", "expected seconds, such as 30 or 0.5"),
        ("dist_init", "-n 2 --timeout -1", "a number of seconds above 0"),
        ("dist_init", "-n 2 --timeout nan", "a number of seconds above 0"),
        ("dist_init", "-n 2 --metrics x", "--metrics x: expected a port, 0-65535"),
        ("dist_init", "-n 2 --metrics 65536", "expected a port, 0-65535"),
        ("dist_init", "-n 2 --engines slrum", "did you mean slurm?"),
        ("dist_init", "-n 2 --profile 'x", "no closing quotation"),
        ("distributed", "--asink", "unknown option --asink; did you mean --async?"),
        ("distributed", "--no-colapse", "did you mean --no-collapse?"),
        ("distributed", "-x", "unknown option -x"),
        ("distributed", "-t 0", "-t 0: expected a number of seconds above 0"),
        ("dist_push", "", "NAME is missing: variables of the notebook"),
        ("dist_abort", "a b", "unexpected argument 'b'"),
        ("dist_status", "now", "unexpected argument 'now'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_message(name: str, line: str, message: str) -> None:
    reported = refused(name, line)
    assert message in reported
    first, usage = reported.split("\n")
    assert first.startswith(f"{COMMANDS[name].title}: ")
    title = COMMANDS[name].title
    # The synopsis of many options hides what is wrong.
    short = f"usage: {title}", f"{title} --help shows its options"
    assert usage.startswith(short[name == "dist_init"])
    assert len(usage) <= SYNOPSIS


@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_usage_example_and_python_twin(name: str, flag: str) -> None:
    command = COMMANDS[name]
    assert command.parse(flag) is None
    text = command.help()
    assert f"usage: {command.title}" in text
    assert f"example:\n  {command.title}" in text
    modules = ("in Python: cluster", "in Python: rankscope.backends")
    twins = (*modules, "rankscope.Cluster", "rankscope.Job")
    assert any(one in text for one in twins)
    for option in command.options:
        assert ", ".join(option.flags) in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_says_what_is_taken_where_an_option_is_not_given(name: str) -> None:
    for option in COMMANDS[name].options:
        # A switch is off; ranks are never started without their number.
        if option.metavar is not None and option.name != "n":
            assert "(default: " in option.help, option.flags


def test_a_value_that_may_be_left_out_is_in_brackets() -> None:
    assert "[--torch [BACKEND]]" in INIT.usage()
    assert "--torch [BACKEND]  " in INIT.help()


def test_the_help_of_a_benchmark_tells_of_gpus() -> None:
    text = COMMANDS["dist_bench"].help()
    assert "--device cuda" in text
    assert "default: cpu, cuda for --backend nccl" in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_example_is_one_that_the_command_takes(name: str) -> None:
    command = COMMANDS[name]
    for line in command.example.splitlines():
        if line.startswith(command.title):
            assert command.parse(line.removeprefix(command.title)) is not None
