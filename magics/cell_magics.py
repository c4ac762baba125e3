"""The magics whose code runs on the ranks: %%distributed, %%rank, %dist_mode."""

from __future__ import annotations

import functools
import time

from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.rank_sets import name_ranks
from rankscope.engines import Cluster, ClusterError, Execution, PullError
from rankscope.engines.observe.lateness import located
from rankscope.engines.wire.message_types import CELL_VALUE
from rankscope.widgets.lateness_text import lateness_text

from .arguments import chosen_ranks, known_group, parse, reported, require_cluster
from .cells.background import BackgroundCell
from .cells.cell import CellRun
from .language.commands import DISTRIBUTED, RANK
from .language.options import Command, Values
from .language.source import cell_number, numbered
from .mode import CellMode
from .output.failures import CommandError
from .output.render import Renderer
from .output.wrapped import wrapped
from .session import session

__all__ = ["CellMagics"]


class CellMagics:
    """A method for each command that runs cells."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        #: Whether cells without a magic run on the ranks.
        self.mode = CellMode(shell)

    def distributed(
        self, command: Command, values: Values, cell: str, in_mode: bool = False
    ) -> BackgroundCell | None:
        """Run the cell on the ranks; `in_mode`: it has no magic (``%dist_mode on``)."""
        cluster, ranks = self._chosen(command, values)
        if values["background"] and values["output"] is not None:
            command.fail("-o waits for the values: leave out --async")
        if values["background"] and values["late"]:
            command.fail("--late waits for the end of the cell: leave out --async")
        if cluster.slurm_job is not None and (warning := cluster.slurm_job.warning()):
            print(warning)
        began = time.time()
        with reported(command):
            sampling = cluster.start_sampling(ranks) if values["late"] else None
            execution = cluster.execute(
                numbered(self.shell, cell),
                ranks=ranks,
                cell=cell_number(self.shell),
                group=values["group"],
                keep_value=values["output"] is not None,
            )
        heading = ""
        if in_mode:
            heading = f"on {name_ranks(execution.ranks)} · %dist_mode off ends this"
        try:
            found = self._follow(cluster, values, execution, heading)
        except BaseException:
            if sampling is not None:
                sampling.stop()
            raise
        if sampling is not None:
            with reported(command):
                late = cluster.lateness(since=began, ended=True)
                findings = located(late.findings(), sampling.take())
                print(wrapped(lateness_text(late.groups(), findings)))
        return found

    #: Run the cell on some ranks.
    rank = distributed

    def _follow(
        self, cluster: Cluster, values: Values, execution: Execution, heading: str
    ) -> BackgroundCell | None:
        """Show the output of a cell to its end; return the handle of ``--async``."""
        shell, collapse, limit = self.shell, not values["apart"], values["limit"]
        session.watch()
        hang = functools.partial(session.hang, began=time.monotonic())
        if values["background"]:
            return BackgroundCell(
                cluster, execution, shell, hang=hang, collapse=collapse, limit=limit
            )
        CellRun(
            cluster,
            execution,
            Renderer(shell, cluster.ranks, heading),
            serve=session.serve_messages,
            hang=hang,
            collapse=collapse,
            limit=limit,
        ).run()
        output = values["output"]
        if output is not None:
            try:
                found = cluster.values(execution)
            except ClusterError as error:
                if isinstance(error, PullError):
                    had = error.of(CELL_VALUE, execution.ranks)
                    shell.user_ns.update({output: had} if had else {})
                raise CommandError(f"%%distributed -o {output}", str(error)) from None
            shell.user_ns[output] = kept = [found[rank] for rank in execution.ranks]
            if all(value is None for value in kept):
                print(
                    f"-o {output}: the last line of the cell has no value: {output} is "
                    f"{'a list of ' if len(kept) > 1 else ''}None; end the cell with "
                    "an expression, or read a variable by %dist_pull"
                )
        return None

    def _chosen(
        self, command: Command, values: Values
    ) -> tuple[Cluster, list[int] | None]:
        """Return the cluster and the ranks of a cell; ``None``: those of its group."""
        cluster, group = require_cluster(command), values["group"]
        known_group(command, group, cluster)
        if values["ranks"] is None:
            return cluster, None
        flag = "" if command is RANK else "-r "
        return cluster, chosen_ranks(command, flag, values["ranks"], cluster, group)

    def dist_mode(self, command: Command, values: Values) -> None:
        """Run every cell on the ranks, or no longer."""
        state = values.pop("state")
        if state not in (None, "on", "off"):
            command.fail(f"{state!r}: expected on or off")
        if state == "on":
            cluster, ranks = self._chosen(command, values)
            self.mode.options = command.written(values)
            where = name_ranks(cluster.ranks if ranks is None else ranks)
            if values["group"] is not None:
                where += f" of group {values['group']!r}"
            print(
                f"every cell runs on {where} from now on; %dist_mode off ends this, "
                "and a cell that begins with %% stays here"
            )
            return
        if state == "off":
            self.mode.options = None
        if self.mode.options is None:
            print("cells run in the notebook; those with %%distributed on the ranks")
        else:
            print(f"cells run on the ranks: %%distributed {self.mode.options}".rstrip())

    def distributed_line(self, line: str) -> None:
        """Answer ``%distributed --help``; refuse the rest: the magic needs a cell."""
        if line.strip() in ("-h", "--help"):
            parse(DISTRIBUTED, line)
        else:
            DISTRIBUTED.fail("it stands on the first line of a cell, with two %%")
