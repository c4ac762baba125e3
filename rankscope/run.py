"""``python -m rankscope.run``: start the ranks of a script, and replace one that dies.

As torchrun on one host, with two differences: ``--max-restarts`` starts one rank again,
and not all, so that the others train on with it (`rankscope.torch.rebuild`); and the
ranks are watched, as under ``torchrun -m rankscope.torch``.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rankscope.engines.script.options import JobOptions, add_metrics, add_script

__all__ = ["command_parser", "main"]

_MORE = """\
What a rank writes has its number before each line. A rank fails if it ends with another
exit code than 0, or by a signal. Where it cannot be started again, the others get
SIGTERM, and after 5 s SIGKILL, and the last lines name the rank that failed first. With
--min-ranks the others go on without it, and none is started again from then on.
Ctrl-C goes to all ranks; a second one kills them. No rank outlives this process.

exit status: 0 if all ranks have ended with 0, except those that the others went on
without, else that of the rank that failed first (128 + the number of the signal), 130
after Ctrl-C, 143 after SIGTERM, 2 where nothing could be started
"""


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rankscope.run",
        description="Start the ranks of a script on this host, with the variables that "
        "torchrun sets, and start a rank that died again.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        *("-n", "--nproc-per-node"),
        type=int,
        default=1,
        metavar="N",
        help="the number of ranks (default: 1)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="how often each rank is started again, alone (default: 0)",
    )
    parser.add_argument(
        "--min-ranks",
        type=int,
        metavar="M",
        help="go on without ranks that cannot be started again while M are left; the "
        "script calls rankscope.torch.shrink() (default: N)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write what rank 2 writes into DIR/rank-2.log as well",
    )
    parser.add_argument(
        "--master-port", type=int, default=0, help="MASTER_PORT (default: a free one)"
    )
    add_metrics(parser)
    add_script(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks that `arguments` name; return the exit status."""
    parser = command_parser()
    given = parser.parse_args(arguments)
    if given.nproc_per_node < 1:
        parser.error(f"-n {given.nproc_per_node}: expected the number of ranks, from 1")
    if given.max_restarts < 0:
        parser.error(f"--max-restarts {given.max_restarts}: expected 0 or more")
    if given.min_ranks is not None and not 1 <= given.min_ranks <= given.nproc_per_node:
        parser.error(
            f"--min-ranks {given.min_ranks}: expected 1 to {given.nproc_per_node}"
        )
    if not 0 <= given.master_port <= 65535:
        parser.error(f"--master-port {given.master_port}: expected a port, 0-65535")
    if given.module:
        sys.path.insert(0, "")
        try:
            found = importlib.util.find_spec(given.script)
        except (ImportError, ValueError):
            found = None
        if found is None:
            parser.error(f"-m {given.script}: no such module")
    elif not Path(given.script).exists():
        parser.error(f"{given.script}: no such file; for a module: -m {given.script}")
    try:
        metrics = JobOptions.of(metrics=given.metrics).metrics
    except ValueError as error:
        parser.error(str(error))
    # Most of the time until ranks are started.
    from rankscope.engines.script.launcher import Launcher, Script

    try:
        launcher = Launcher(
            given.nproc_per_node,
            Script(given.script, given.arguments, given.module, metrics),
            restarts=given.max_restarts,
            least=given.min_ranks,
            port=given.master_port,
            log_folder=given.log_dir,
        )
    except OSError as error:
        what = f"--master-port {given.master_port}, or --log-dir {given.log_dir}"
        parser.error(f"{what}: {error}")
    return launcher.run()


if __name__ == "__main__":
    # Until the launcher has handlers of its own: there are no ranks to end.
    for _signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(_signum) is not signal.SIG_IGN:
            signal.signal(_signum, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
