"""A training job on paper: its groups, and the ops that each rank issues in order.

The shape follows Megatron: tensor (tp), context (cp), data (dp) and pipeline (pp)
parallel groups, micro-batches, gradients, embeddings, a norm over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

__all__ = ["Group", "Job", "Layout", "Op", "Part", "make_job"]

_LONG_NAMES = {
    "dp": "DATA_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "model": "MODEL_PARALLEL_GROUP",
    "embd": "EMBEDDING_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
}


@dataclass(frozen=True)
class Group:
    """A process group: the groups of one split share their name, not `uid`."""

    uid: int
    kind: str
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A send or a receive: the op itself, or one of a batch."""

    kind: str
    peer: int
    numel: int


@dataclass(frozen=True)
class Op:
    """An op of a rank's program: a collective, a send or receive, or a batch."""

    name: str
    group: Group
    numel: int
    file: str
    line: int
    dtype: str = "Float"
    #: What a send, a receive or a batch is made of; a collective has none.
    parts: tuple[Part, ...] = ()
    #: Whether the parts are recorded as a batch (batch_isend_irecv).
    batch: bool = False
    #: Whether later ops of the rank's stream wait for it (async_op=False).
    blocks_stream: bool = True
    #: Whether Python waits until it is complete (``.item()``, a barrier).
    blocks_host: bool = False

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the input and of the output."""
        many = self.numel * len(self.group.ranks)
        if self.name == "_all_gather_base":
            return [self.numel], [many]
        if self.name == "_reduce_scatter_base":
            return [many], [self.numel]
        return [self.numel], [self.numel]

    def differs(self, other: Op) -> str:
        """Return what tells two collectives apart, ``""`` for nothing."""
        if self.name != other.name:
            return "op mismatch"
        if self.sizes != other.sizes and self.name != "all_to_all":
            return "size mismatch"
        return "dtype mismatch" if self.dtype != other.dtype else ""


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided, and how the job is written."""

    tp: int
    cp: int
    dp: int
    pp: int
    steps: int
    microbatches: int
    layers: int
    #: "batch" (1F1B), or GPipe with "blocking" or "isend" sends.
    pipeline: str
    #: Sends and receives of the pipeline use the default group.
    pipeline_on_default: bool
    #: A step ends in ops that Python waits for.
    syncs: bool
    #: A ring of sends and receives over the cp group.
    ring: bool
    #: Gradients are reduced in buckets that overlap with what follows.
    overlap: bool
    #: Which of the variants of layers, gradients and names.
    style: int
    #: Chunks of the model in each stage: with 2, the last stage sends to the first.
    chunks: int = 1
    #: Experts are on groups of ranks, which are parts of the data parallel ones.
    experts: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@dataclass
class Job:
    layout: Layout
    groups: list[Group]
    programs: list[list[Op]] = field(default_factory=list)

    def stage(self, rank: int) -> int:
        return rank // (self.layout.world // self.layout.pp)

    def of(self, rank: int) -> list[Group]:
        """Return the groups of `rank` in the order in which it made them."""
        return [group for group in self.groups if rank in group.ranks]


def make_job(layout: Layout) -> Job:
    """Return the groups and the program of each rank."""
    job = Job(layout, _groups(layout))
    for rank in range(layout.world):
        program = _Program(job, rank)
        job.programs.append([op for n in range(layout.steps) for op in program.step(n)])
    return job


def _groups(layout: Layout) -> list[Group]:
    """Return all groups; rank = ((pp * dps + dp) * cps + cp) * tps + tp."""
    tps, cps, dps, pps = layout.tp, layout.cp, layout.dp, layout.pp
    stage = layout.world // pps

    def split(color: Callable[[int], Hashable]) -> list[tuple[int, ...]]:
        found: dict[Hashable, list[int]] = {}
        for rank in range(layout.world):
            found.setdefault(color(rank), []).append(rank)
        return [tuple(members) for members in found.values() if len(members) > 1]

    kinds: dict[str, list[tuple[int, ...]]] = {
        "dp": split(lambda r: (r // stage, r % (tps * cps))),
        "cp": split(lambda r: (r // (tps * cps), r % tps)),
        "dp_cp": split(lambda r: (r // stage, r % tps)) if min(cps, dps) > 1 else [],
        "tp": split(lambda r: r // tps),
        "pp": split(lambda r: r % stage),
        "model": split(lambda r: r // (tps * cps) % dps) if dps > 1 else [],
        "embd": [(r, r + (pps - 1) * stage) for r in range(stage)] if pps > 2 else [],
        "half": split(lambda r: r % 2) if layout.world > 3 else [],
    }
    if layout.experts:
        width = tps * cps
        kinds["ep"] = split(lambda r: (r // stage, r % width, r % stage // width // 2))
    groups = [Group(0, "world", "0", "default_pg", tuple(range(layout.world)))]
    for kind, members in kinds.items():
        for number, ranks in enumerate(members):
            uid = len(groups)
            if kind == "half":  # as dist.split_group names its groups
                name, desc = f"0:split:{len(kinds)}", "half"
            elif layout.style % 3:
                name, desc = str(uid), _LONG_NAMES[kind]
            else:
                name, desc = f"{kind}{number}", kind
            groups.append(Group(uid, kind, name, desc, ranks))
    return groups


class _Program:
    """Writes the program of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.layout, self.rank, self.style = job.layout, rank, job.layout.style
        self.mine = {group.kind: group for group in job.of(rank)}
        self.hidden = 64 * (1 + self.style % 3)
        per_stage = self.layout.world // self.layout.pp
        self.stage = job.stage(rank)
        self.before = rank - per_stage if self.stage else None
        self.after = rank + per_stage if self.stage < self.layout.pp - 1 else None

    def op(self, kind: str, name: str, numel: int, at: str, **more) -> Iterator[Op]:
        """Give a collective of the group of that kind, if the rank is in one."""
        if kind in self.mine:
            file, line = at.split(":")
            yield Op(name, self.mine[kind], numel, file, int(line), **more)

    def p2p(self, line: int, *wanted: tuple[str, int | None]) -> Iterator[Op]:
        """Give sends and receives of the pipeline to the neighbours that there are."""
        group = self.mine["world" if self.layout.pipeline_on_default else "pp"]
        parts = tuple(Part(k, p, self.hidden * 4) for k, p in wanted if p is not None)
        if parts and self.layout.pipeline == "batch":
            yield Op(
                "coalesced", group, 0, "pipeline.py", line, "BFloat16", parts, True
            )
            return
        for part in parts:
            waits = self.layout.pipeline != "isend" or part.kind == "recv"
            yield self.single(part, group, "pipeline.py", line, waits)

    def single(self, part: Part, group: Group, file: str, line: int, waits: bool) -> Op:
        return Op(
            part.kind, group, part.numel, file, line, "BFloat16", (part,), False, waits
        )

    def layers(self, line: int) -> Iterator[Op]:
        for _ in range(self.layout.layers):
            if self.style % 2:
                yield from self.op(
                    "tp", "all_reduce", self.hidden, f"tp_layer.py:{line}"
                )
                continue
            for plus, name in (2, "_all_gather_base"), (5, "_reduce_scatter_base"):
                at = f"tp_layer.py:{line + plus}"
                yield from self.op("tp", name, self.hidden, at, dtype="BFloat16")

    def forward(self) -> Iterator[Op]:
        yield from self.layers(31)
        if self.style % 5 == 4:  # experts: each rank has other sizes
            mine = self.hidden + self.rank
            yield from self.op("dp", "all_to_all", mine, "experts.py:27")
        if self.layout.experts:
            for line in 41, 55:
                mine = self.hidden + self.rank
                yield from self.op("ep", "all_to_all", mine, f"experts.py:{line}")
        group = self.mine.get("cp")
        if group and self.layout.ring:  # even members send first, odd ones receive
            here, size = group.ranks.index(self.rank), len(group.ranks)
            send = Part("send", group.ranks[(here + 1) % size], self.hidden)
            recv = Part("recv", group.ranks[here - 1], self.hidden)
            for part in (recv, send) if here % 2 else (send, recv):
                line = 12 if part is send else 15
                yield self.single(part, group, "ring.py", line, True)

    def interleaved(self) -> Iterator[Op]:
        """Give a pipeline in which the first stage comes after the last one, too."""
        world = self.layout.world
        size = world // self.layout.pp
        before, after = (self.rank - size) % world, (self.rank + size) % world
        chunks, last = range(self.layout.chunks), self.layout.pp - 1
        for _ in range(self.layout.microbatches):
            for chunk in chunks:
                first, final = chunk == 0, chunk == chunks[-1]
                if not (first and self.stage == 0):
                    yield from self.p2p(301, ("recv", before))
                yield from self.forward()
                if not (final and self.stage == last):
                    yield from self.p2p(305, ("send", after))
        for _ in range(self.layout.microbatches):
            for chunk in reversed(chunks):
                first, final = chunk == 0, chunk == chunks[-1]
                if not (final and self.stage == last):
                    yield from self.p2p(312, ("recv", after))
                yield from self.layers(58)
                if not (first and self.stage == 0):
                    yield from self.p2p(316, ("send", before))

    def pipeline(self) -> Iterator[Op]:
        before, after, many = self.before, self.after, self.layout.microbatches
        if self.layout.chunks > 1:
            yield from self.interleaved()
            return
        if self.layout.pipeline != "batch":  # GPipe: all forwards, then all backwards
            for _ in range(many):
                yield from self.p2p(140, ("recv", before))
                yield from self.forward()
                yield from self.p2p(144, ("send", after))
            for _ in range(many):
                yield from self.p2p(162, ("recv", after))
                yield from self.layers(58)
                yield from self.p2p(166, ("send", before))
            return
        warm = min(self.layout.pp - self.stage - 1, many)  # 1F1B
        for _ in range(warm):
            yield from self.p2p(201, ("recv", before))
            yield from self.forward()
            yield from self.p2p(205, ("send", after))
        if many > warm:
            yield from self.p2p(211, ("recv", before))
        for left in reversed(range(many - warm)):
            yield from self.forward()
            yield from self.p2p(218, ("send", after), ("recv", after))
            yield from self.layers(58)
            again = (("recv", before),) if left else ()
            yield from self.p2p(223, ("send", before), *again)
        for _ in range(warm):
            yield from self.p2p(232, ("recv", after))
            yield from self.layers(58)
            yield from self.p2p(236, ("send", before))

    def step(self, number: int) -> Iterator[Op]:
        wait = {"blocks_host": self.layout.syncs}
        data = "dp_cp" if "dp_cp" in self.mine else "dp"
        sharded = self.style % 4 >= 2
        yield from self.op("tp", "broadcast", 16, "data.py:77", dtype="Long")
        if self.layout.pp > 1:
            yield from self.pipeline()
        else:
            for _ in range(self.layout.microbatches):
                yield from self.forward()
                yield from self.layers(58)
        name, numel, at = "all_reduce", 4096, "train.py:88"
        if sharded:
            name, numel, at = "_reduce_scatter_base", 1024, "optimizer.py:41"
        for bucket in range(3 if self.layout.overlap else 1):
            more = {"blocks_stream": not self.layout.overlap}
            yield from self.op(data, name, numel >> bucket, at, **more)
        yield from self.op("embd", "all_reduce", 512, "train.py:93")
        yield from self.op("model", "all_reduce", 1, "optimizer.py:52", **wait)
        yield from self.op("world", "all_reduce", 2, "train.py:101", **wait)
        if sharded:
            yield from self.op(data, "_all_gather_base", 1024, "optimizer.py:66")
        yield from self.op("half", "all_reduce", 8, "metrics.py:19")
        if number % 2:
            yield from self.op("world", "all_reduce_barrier", 1, "train.py:110", **wait)
