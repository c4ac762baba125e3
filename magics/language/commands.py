"""The commands of the magics: options, help texts and examples."""

from rankscope.backends.benchmark import parse_sizes
from rankscope.backends.groups.api import DEFAULT_TIMEOUT
from rankscope.engines.launch.hosts import LOST_AFTER
from rankscope.engines.wire.gpu_environment import parse_devices

from . import values
from .options import Command, Option, Parameter

__all__ = ["COMMANDS", "DISTRIBUTED", "DIST_INIT", "DIST_MODE", "RANK"]

_RANKS = Option(
    "ranks", ("-r", "--ranks"), "ranks such as 0,2-3 (default: all)", "RANKS",
    kind="ranks",
)  # fmt: skip
_GROUP = Parameter("group", "GROUP", "?", "name of a group (default: all)", "group")
_CELL_GROUP = Option(
    "group", ("-g", "--group"), "run on this group's ranks, as default group (default: "
    "default)", "GROUP", kind="group",
)  # fmt: skip

DIST_INIT = Command(
    "dist_init",
    "Start ranks, or attach to running ones, and build the default group.",
    "%dist_init -n 4\n%dist_init -n 4 --backend cpu:ucx --timeout 60\n"
    "%dist_init -n 4 --torch\n%dist_init --hosts a:4,b:4\n"
    "%dist_init --slurm \"-p gpu -N 2 --gpus-per-node 8 -t 1:00:00\"\n"
    "%dist_init --cluster-id CLUSTER",
    "cluster = rankscope.Cluster.start(4), rankscope.Cluster.attach(cluster_id=…)",
    (
        Option(
            "n", ("-n", "--ranks"), "number of ranks to start", "N", values.count,
            elsewhere=(
                "--np", "-np", "--world", "--world-size", "--world_size", "--nproc",
                "--nproc-per-node", "--nproc_per_node", "--num-ranks", "--size",
                "--processes", "--num-processes",
            ),
        ),
        Option(
            "backend", ("--backend",), "backends by device, e.g. cpu:ucx "
            "(default: cpu:tcp, and cuda:nccl where cupy is installed)",
            "CONFIG", values.backend, "backend",
        ),
        Option(
            "torch", ("--torch",), "begin with torch.distributed as dist, and its "
            "default group over BACKEND: gloo, nccl, cpu:gloo,cuda:nccl (default: this "
            "one where every rank has a GPU, else gloo), or rankscope: Rankscope's "
            "default group, over --backend, does torch's ops",
            "BACKEND", values.torch_backend, "torch_backend", implied=True,
        ),
        Option(
            "hosts", ("--hosts",), "hosts of the ranks, reached by ssh, with the "
            "number of ranks on each, e.g. a:4,b:4; or a hostfile (default: this "
            "host)", "HOSTS",
            values.hosts, "file",
        ),
        Option(
            "slurm", ("--slurm",), "nodes of Slurm, with options of salloc in quotes; "
            "ranks: -n, else the tasks of the job, else its GPUs (default: the job "
            "that the notebook is in)", "OPTIONS",
            values.slurm, implied=True,
        ),
        Option(
            "dry_run", ("--dry-run",), "show what --slurm would submit",
        ),
        Option(
            "remote_python", ("--remote-python",), "Python of the other hosts "
            "(default: this one's path)", "PATH",
        ),
        Option(
            "interface", ("--interface",), "interface or address of this host, at "
            "which the hosts reach it (default: that of ssh)", "IFACE",
        ),
        Option(
            "start_timeout", ("--start-timeout",), "seconds that the start may take "
            "(default: 120), once Slurm has given its nodes", "S", values.seconds,
        ),
        Option(
            "lost_after", ("--lost-after",), "seconds for which ranks of other hosts "
            f"may be out of reach (default: {LOST_AFTER:g})", "S", values.seconds,
        ),
        Option(
            "engines", ("--engines",), "launcher: local, spawn (not forked), mpi; "
            "never tried: pbs, … (default: the one that the backend needs, else "
            "local)",
            "LAUNCHER", values.launcher, "launcher",
        ),
        Option(
            "timeout", ("--timeout",), "timeout of collectives in seconds (default: "
            f"{DEFAULT_TIMEOUT:g})", "S", values.seconds,
        ),
        Option(
            "devices", ("--devices",), "GPUs of each host that ranks take in turn, "
            "e.g. 0,2-3 (default: all)", "LIST", parse_devices, "gpus",
        ),
        Option(
            "share_gpu", ("--share-gpu",), "let ranks share a GPU: slow, for learning",
        ),
        Option(
            "force", ("--force",), "start more ranks than cores and memory allow",
        ),
        Option(
            "replace", ("--replace",), "end the ranks that run here, then start",
        ),
        Option(
            "keep", ("--keep",), "keep the ranks running when the notebook ends",
        ),
        Option(
            "metrics", ("--metrics",), "serve what the ranks do to Prometheus, at "
            "127.0.0.1:PORT (0: a free one), as long as this notebook uses them "
            "(default: not)",
            "PORT", values.port,
        ),
        Option(
            "profile", ("--profile",), "IPython profile of the cluster (default: "
            "default)", "P", kind="profile",
        ),
        Option(
            "cluster_id", ("--cluster-id",), "attach to this cluster; with -n: name it "
            "(default: a new name)", "C", kind="cluster",
        ),
        Option(
            "connection_file", ("--connection-file",),
            "attach by the cluster's connection file (default: that of the profile)",
            "F", kind="file",
        ),
    ),
    meant="n",
)  # fmt: skip

DISTRIBUTED = Command(
    "distributed",
    "Run the cell on the ranks. dist, rank, world_size and np are there.\n"
    "Output streams while it runs; output that ranks share is shown once.",
    "%%distributed -r 0,2-3\nx = np.full(3, rank)\ndist.all_reduce(x)\nx",
    "cluster.execute(code, ranks=[0, 2, 3]).result(); with keep_value=True,\n"
    "cluster.values(cell) has what -o gives",
    (
        _RANKS,
        _CELL_GROUP,
        Option(
            "limit", ("-t", "--timeout"), "end the cell after so many seconds "
            "(default: never)", "SECONDS", values.seconds,
        ),
        Option(
            "output", ("-o", "--output"), "put the values of the last expression here, "
            "a list in rank order (default: _ranks)", "NAME", values.identifier,
            implied="_ranks",
        ),
        Option(
            "background", ("--async",), "return at once, with a handle (it is in _)",
        ),
        Option(
            "apart", ("--no-collapse",), "show the output of each rank separately",
        ),
        Option(
            "late", ("--late",), "say at the end which ranks kept the others waiting",
        ),
    ),
    cell=True,
)  # fmt: skip

RANK = Command(
    "rank",
    "Run the cell on some ranks: %%distributed -r RANKS.",
    "%%rank 0,2-3\nx = np.full(3, rank)",
    "cluster.execute(code, ranks=[0, 2, 3]).result()",
    tuple(one for one in DISTRIBUTED.options if one.name != "ranks"),
    Parameter("ranks", "RANKS", "1", "ranks such as 0,2-3", "ranks"),
    cell=True,
)

DIST_MODE = Command(
    "dist_mode",
    "Run every cell on the ranks, without %%distributed, until it is off. Cells that\n"
    "begin with %% stay in the notebook, and so do lines with % or ! at the top.",
    "%dist_mode on\n%dist_mode on -r 0,2-3\n%dist_mode off",
    "cluster.execute(code) for each cell",
    (
        _RANKS,
        _CELL_GROUP,
        Option(
            "limit", ("-t", "--timeout"), "end each cell after so many seconds "
            "(default: never)", "SECONDS", values.seconds,
        ),
    ),
    Parameter("state", "STATE", "?", "on or off (default: say which it is)", "mode"),
)  # fmt: skip

COMMANDS = {
    command.name: command
    for command in (
        DIST_INIT,
        DISTRIBUTED,
        RANK,
        DIST_MODE,
        Command(
            "dist_attach",
            "See the job of a script on the board: groups, hangs and their causes.\n"
            "The script runs under -m rankscope.torch or -m rankscope.run, or calls\n"
            "rankscope.torch.watch(), and prints this line. It takes no cells.\n"
            "Or use the ranks of another notebook, which take cells.",
            "%dist_attach 127.0.0.1:29400 --key 5fd1…\n%dist_attach\n"
            "%dist_attach rankscope-5fd1…\n%dist_attach --slurm 21",
            "job = rankscope.Job.attach('127.0.0.1:29400', key='…'),\n"
            "cluster = rankscope.Cluster.attach(slurm='21')",
            (
                Option(
                    "slurm", ("--slurm",), "the ranks that a notebook has in this job "
                    "of Slurm (default: those of HOST:PORT)", "JOBID",
                ),
                Option(
                    "key", ("--key",), "the job's key (default: from the file of a job "
                    "of yours, or RANKSCOPE_KEY)", "KEY",
                ),
            ),
            Parameter(
                "address", "HOST:PORT", "?", "where the job listens, or the name of a "
                "notebook's cluster (default: your only job; your only cluster)", "job",
            ),
        ),
        Command(
            "dist_status",
            "Show what every rank is doing, as a table.",
            "%dist_status",
            "cluster.status()",
        ),
        Command(
            "dist_board",
            "Show the live board: what every rank is doing, why it hangs, buttons to\n"
            "end it. %dist_init shows it too; it may be shown as often as you like.",
            "%dist_board\n%dist_board --pin\n%dist_board --in-cells off",
            "rankscope.widgets.Board(cluster, get_ipython()).show(), with a\n"
            "rankscope.Cluster",
            (
                Option(
                    "pin", ("--pin",), "keep it in sight, for later clusters too: "
                    "beside the notebook in JupyterLab with the package sidecar, else "
                    "as a bar with state, verdict and Abort",
                ),
                Option("unpin", ("--unpin",), "remove the panel or the bar"),
                Option(
                    "in_cells", ("--in-cells",), "whether a cell that hangs shows why "
                    "below itself, with Abort (default: on)", "on|off",
                    values.switch,
                ),
            ),
        ),
        Command(
            "dist_diagnose",
            "Show why an op hangs: the rank at fault, and both source lines.",
            "%dist_diagnose",
            "cluster.diagnose()",
        ),
        Command(
            "dist_open",
            "Show why a job hung, from the files that it has left: dumps of torch's\n"
            "Flight Recorder, stacks, logs of torchrun; folders and archives too. It\n"
            "needs no ranks.",
            "%dist_open job/",
            "rankscope.backends.post_mortem.report.examine(['job/'])",
            parameter=Parameter(
                "paths", "PATH", "+", "files, folders and archives", "file",
            ),
        ),
        Command(
            "dist_profile",
            "Show where the ranks are now, thread by thread, also while they hang;\n"
            "with -t, where they spend the next seconds, as a flame graph. It runs\n"
            "beside cells of %%distributed --async; beside any other cell, Profile on\n"
            "the board and rankscope profile in a terminal do. An interrupt ends it\n"
            "early: it shows what was seen so far.",
            "%dist_profile\n%dist_profile -t 5 -r 0,2-3\n"
            "p = %dist_profile -t 5\np.save('profile.html')",
            "cluster.stacks(), rankscope.widgets.ProfileReport(cluster.sample(5))",
            (
                _RANKS,
                Option(
                    "seconds", ("-t", "--time"), "sample for so many seconds (default: "
                    "show the stacks of this moment)", "SECONDS", values.seconds,
                ),
                Option(
                    "every", ("-a", "--all"), "all threads, those of Jupyter and "
                    "Rankscope too, and what goes on inside Rankscope's ops",
                ),
            ),
        ),
        Command(
            "dist_debug",
            "Open the frame in which the last failed cell of a rank raised, in a\n"
            "prompt here: p x, up, down, l; q or an interrupt leaves it. The other\n"
            "ranks are free meanwhile.",
            "%dist_debug -r 2",
            "cluster.debug(2), cluster.answer_prompt(2, …)",
            (
                Option(
                    "rank", ("-r", "--rank"), "the rank (default: the only one whose "
                    "last cell failed)", "RANK", kind="ranks",
                ),
            ),
        ),
        Command(
            "dist_abort",
            "Fail what is in flight on a group, at once.",
            "%dist_abort default",
            "cluster.abort('default', reason='…')",
            parameter=_GROUP,
        ),
        Command(
            "dist_rebuild",
            "Make an aborted group usable again.",
            "%dist_rebuild default",
            "cluster.rebuild('default')",
            parameter=_GROUP,
        ),
        Command(
            "dist_push",
            "Copy variables of the notebook to the ranks.",
            "%dist_push x weights -r 0",
            "cluster.push({'x': x}, ranks=[0])",
            (_RANKS,),
            Parameter("names", "NAME", "+", "variables of the notebook", "variable"),
        ),
        Command(
            "dist_pull",
            "Copy variables of the ranks here: a list in rank order, or the value\n"
            "itself if -r names a single rank.",
            "%dist_pull loss -r 0",
            "cluster.pull('loss', ranks=[0])",
            (_RANKS,),
            Parameter("names", "NAME", "+", "variables on the ranks", "rank_variable"),
        ),
        Command(
            "dist_restart",
            "Give ranks a fresh engine each; they keep their number and groups and\n"
            "lose their variables.",
            "%dist_restart 2",
            "cluster.restart([2]); without RANKS, where ranks are dead,\n"
            "cluster.restart(cluster.status().dead); cluster.restart() replaces all",
            parameter=Parameter(
                "ranks", "RANKS", "*", "ranks such as 0,2-3, or 0 2 (default: the "
                "dead ones)", "ranks",
            ),
        ),
        Command(
            "dist_trace",
            "Write down what all ranks did, also while a collective hangs: a file\n"
            "that ends with .json is a trace for Perfetto; a folder, or a prefix of\n"
            "files, gets a dump of each rank in PyTorch's Flight Recorder format.",
            "%dist_trace run.json\n%dist_trace dumps/",
            "cluster.flight_records().save('run.json')",
            parameter=Parameter(
                "path", "FILE", "1", "file or folder to write", "file",
            ),
        ),
        Command(
            "dist_bench",
            "Measure a collective size by size: nccl-tests' table, and its plots.\n"
            "The result has the columns of a DataFrame: r = %dist_bench …; r['busbw'].",
            "%dist_bench all_reduce --sizes 1K:64M\n"
            "%dist_bench all_reduce --sizes 1K:16M:4 --backend tcp,ucx --csv ar.csv\n"
            "%dist_bench all_reduce --device cuda",
            "cluster.bench('all_reduce', '1K:64M', backends=['tcp']).result()",
            (
                Option(
                    "sizes", ("--sizes",), "bytes: 1K:64M (doubling), 1K:64M:4 (times "
                    "4), or 4K,1M (default: 1K:64M)", "SIZES", parse_sizes,
                ),
                Option(
                    "backends", ("--backend",), "backends to compare, such as tcp,mpi "
                    "(default: the group's)", "NAMES", values.names, "backend_name",
                ),
                Option(
                    "dtype", ("--dtype",), "dtype of the elements (default: float32)",
                    "DTYPE", values.dtype, "dtype",
                ),
                Option(
                    "device", ("--device",), "where the arrays are, cpu or cuda "
                    "(default: cpu, cuda for --backend nccl)", "DEVICE",
                    values.device, "device",
                ),
                Option(
                    "group", ("-g", "--group"), "group whose ranks measure (default: "
                    "default)", "GROUP", kind="group",
                ),
                Option(
                    "iterations", ("--iters",), "ops that are timed (default: 20)", "N",
                    values.times,
                ),
                Option(
                    "warmup", ("--warmup",), "ops before the clock starts (default: 5)",
                    "N", values.times,
                ),
                Option(
                    "csv", ("--csv",), "write the rows there, too (default: nowhere)",
                    "FILE", kind="file",
                ),
            ),
            Parameter(
                "op", "OP", "?", "collective to measure (default: all_reduce)",
                "benchmark",
            ),
        ),
        Command(
            "dist_shutdown",
            "End the ranks and their processes (attached ranks, and those that were\n"
            "started with --keep, keep running).",
            "%dist_shutdown",
            "cluster.shutdown(); of attached and kept ranks cluster.close(), as\n"
            "shutdown() ends them too",
            (
                Option(
                    "everything", ("--all",), "end attached and kept ranks, too, "
                    "whoever else uses them",
                ),
            ),
        ),
    )
}  # fmt: skip
