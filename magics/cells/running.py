"""A ``%%distributed`` cell from its command line to its end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from IPython.core.interactiveshell import InteractiveShell

from rankscope.engines import Cluster, ClusterError, Execution

from ..language.options import Values
from ..language.source import cell_number, numbered
from ..output.failures import CommandError
from ..output.render import Renderer
from .background import BackgroundCell
from .cell import CellRun

__all__ = ["follow_cell", "start_cell"]


def start_cell(
    shell: InteractiveShell,
    cluster: Cluster,
    values: Values,
    ranks: Sequence[int] | None,
    cell: str,
) -> Execution:
    """Send `cell` to `ranks`; `values` are those of its command line."""
    return cluster.execute(
        numbered(shell, cell),
        ranks=ranks,
        cell=cell_number(shell),
        group=values["group"],
        keep_value=values["output"] is not None,
    )


def follow_cell(
    shell: InteractiveShell,
    cluster: Cluster,
    values: Values,
    execution: Execution,
    serve: Callable[[], None],
    heading: str = "",
) -> BackgroundCell | None:
    """Show the output of a cell to its end; return the handle of ``--async``.

    ``serve()`` is called while the cell runs. A `heading` is shown above its output.
    """
    collapse, limit = not values["apart"], values["limit"]
    if values["background"]:
        return BackgroundCell(cluster, execution, shell, collapse=collapse, limit=limit)
    renderer = Renderer(shell, cluster.ranks, heading)
    run = CellRun(
        cluster, execution, renderer, serve=serve, collapse=collapse, limit=limit
    )
    run.run()
    output = values["output"]
    if output is not None:
        try:
            found = cluster.values(execution)
        except (ClusterError, pickle.PickleError) as error:
            raise CommandError(f"%%distributed -o {output}", str(error)) from None
        shell.user_ns[output] = [found[rank] for rank in execution.ranks]
    return None
