"""``%dist_bench``: runs the benchmark's cell, says how far it is, shows the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from IPython.core.interactiveshell import InteractiveShell

from rankscope.engines import Cluster
from rankscope.engines.ranks import DEFAULT_SIZES
from rankscope.widgets import BenchReport, ProgressLine, name_ranks
from rankscope.widgets.units import bytes_text, duration_text

from .cell import CellRun
from .failures import CellError, CommandError, is_release
from .merge import Item
from .options import Values
from .screen import Screen
from .source import cell_number

__all__ = ["run_bench"]


def run_bench(
    shell: InteractiveShell,
    cluster: Cluster,
    values: Values,
    serve: Callable[[], None],
) -> BenchReport:
    """Measure what the command line asks for; return the report.

    ``serve()`` is called while it waits. What was measured before a failure or
    an interrupt is shown, and the error raised.
    """
    given = {
        name: values[name]
        for name in ("backends", "dtype", "device", "iterations", "warmup")
        if values[name] is not None
    }
    bench = cluster.bench(
        values["op"] or "all_reduce",
        values["sizes"] or DEFAULT_SIZES,
        group=values["group"],
        shared=not values["ordinary"],
        cell=cell_number(shell),
        **given,
    )
    said = 0

    def look() -> None:
        nonlocal said
        serve()
        rows = bench.rows
        if len(rows) > said:
            said, row = len(rows), rows[-1]
            progress.update(
                f"{said} of {bench.total}: {row.op} {bytes_text(row.size)} with "
                f"{row.backend} takes {duration_text(row.time / 1e6)}"
            )

    try:
        with ProgressLine(shell) as progress:
            progress.update(f"0 of {bench.total} sizes measured")
            screen = _Screen(shell, cluster.ranks)
            CellRun(cluster, bench.execution, screen, serve=look).run()
    except BaseException as error:
        if bench.rows:
            report = BenchReport(bench.rows)
            shell.display_pub.publish(report._repr_mimebundle_())
        if isinstance(error, CellError):
            raise CommandError("%dist_bench", _reasons(error)) from None
        raise
    report = BenchReport(bench.result())
    if values["csv"] is not None:
        report.to_csv(values["csv"])
    return report


class _Screen(Screen):
    """Shows no tracebacks: the code that ran there is not the person's."""

    def show(self, items: Iterable[tuple[str, Item]]) -> None:
        super().show([pair for pair in items if pair[1].kind != "error"])

    def redraw(self, items: Iterable[tuple[str, Item]]) -> None:
        super().redraw([pair for pair in items if pair[1].kind != "error"])


def _reasons(error: CellError) -> str:
    """What the ranks said, each reason once; those that were let go say nothing."""
    causes = {r: e for r, e in error.errors.items() if not is_release(e)}
    said: dict[str, list[int]] = {}
    for rank, one in (causes or error.errors).items():
        reason = f"{one.ename}: {one.evalue}".replace(f" on rank {rank}", "")
        said.setdefault(reason, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in said.items())
