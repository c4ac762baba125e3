"""``%dist_bench``: runs the benchmark's cell, shows its progress and result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from IPython.core.interactiveshell import InteractiveShell

from rankscope.engines import Cluster
from rankscope.engines.cluster.ranks import DEFAULT_SIZES
from rankscope.engines.errors import group_by_message
from rankscope.widgets import BenchReport, ProgressLine
from rankscope.widgets.units import bytes_text, duration_text

from ..language.options import Values
from ..language.source import cell_number
from ..output.deduplicate import Item
from ..output.failures import CellError, CommandError
from ..output.render import Renderer
from .cell import CellRun

__all__ = ["run_bench"]


def run_bench(
    shell: InteractiveShell, cluster: Cluster, values: Values, serve: Callable[[], None]
) -> BenchReport:
    """Run the benchmark of the command line; return the report."""
    given = {
        name: values[name]
        for name in ("backends", "dtype", "device", "iterations", "warmup")
        if values[name] is not None
    }
    bench = cluster.bench(
        values["op"] or "all_reduce",
        values["sizes"] or DEFAULT_SIZES,
        group=values["group"],
        cell=cell_number(shell),
        **given,
    )
    shown = 0

    def look() -> None:
        nonlocal shown
        serve()
        rows = bench.rows
        if len(rows) > shown:
            shown, row = len(rows), rows[-1]
            progress.update(
                f"{shown} of {bench.total}: {row.op} {bytes_text(row.size)} with "
                f"{row.backend} takes {duration_text(row.time / 1e6)}"
            )

    try:
        with ProgressLine(shell) as progress:
            progress.update(f"0 of {bench.total} sizes measured")
            renderer = _Renderer(shell, cluster.ranks)
            CellRun(cluster, bench.execution, renderer, serve=look).run()
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


class _Renderer(Renderer):
    """Shows no tracebacks: the code of the cell is Rankscope's."""

    def show(self, items: Iterable[Item]) -> None:
        super().show([item for item in items if item.kind != "error"])

    def redraw(self, items: Iterable[Item]) -> None:
        super().redraw([item for item in items if item.kind != "error"])


def _reasons(error: CellError) -> str:
    """Return each reason of a failure once, without ops that were only aborted."""
    causes = {r: e for r, e in error.errors.items() if not e.is_abort_echo}
    return group_by_message(
        {r: f"{e.ename}: {e.evalue}" for r, e in (causes or error.errors).items()}
    )
