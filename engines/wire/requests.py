"""The requests to the agents of the engines: one class for each, for both ends.

The fields of a request are JSON values. Its class names the type of the answer, so
that the notebook's `ControlChannel.ask` and the agent's handlers are checked against
each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from rankscope.backends.observe.stacks import Frame, Stack

A = TypeVar("A")
R = TypeVar("R", bound="Request[Any]")
S = TypeVar("S")

#: What a rank reports about itself (`status.Summary`), encoded.
EncodedSummary = str
#: What `World.export_groups` returns.
ExportedGroups = dict[str, Any]
#: A device type, its backend, and why its arrays are refused.
Refusal = tuple[str, str, str]


class RankAssignment(TypedDict):
    """The rank that an engine has."""

    rank: int
    world_size: int
    #: The fields of `TorchOptions`; ``None`` where cells begin without torch.
    torch: dict[str, Any] | None


class Hello(TypedDict):
    """An engine's description of itself."""

    version: str
    pid: int
    host: str
    #: The host's address in the network towards the controller.
    address: str
    #: A port of the host that was free.
    port: int
    #: The rank within the job of mpiexec or srun, if it started the engine.
    job_rank: int | None
    #: ``None`` before the engine has a rank.
    assignment: RankAssignment | None
    hosts_store: bool


class GpuAnswer(TypedDict):
    """The GPU of a rank that was assigned."""

    #: The GPU's own; empty without a GPU, or where it is not known.
    uuid: str
    #: Whether the rank may use a GPU that another rank uses.
    may_share: bool


class TorchAnswer(GpuAnswer):
    """What a rank has of torch."""

    version: str
    #: CUDA devices that torch can use.
    gpus: int
    #: The port of the store that the rank hosts for torch's default group, or 0.
    port: int
    #: Why torch cannot be used, with the remedy; empty where it can.
    missing: str


class Client(TypedDict):
    """A client that sends cells."""

    #: That of its messages.
    session: str
    #: Its notebook or script, for a message.
    who: str


class Holder(TypedDict):
    """The client whose cell a rank runs, or is about to run."""

    #: Its notebook or script, for a message.
    who: str
    cell: int | None
    #: Since when.
    seconds: float


class StoreAddress(TypedDict):
    """How to reach the store of all ranks."""

    host: str
    port: int
    #: Hexadecimal.
    key: str


class NcclReport(TypedDict):
    """What the RAS service of NCCL on the rank's host reports about the job."""

    #: Whether a query is under way, so that a later request has an answer.
    pending: bool
    #: Why there is no report.
    error: str
    #: `backends.nccl.ras.RasCommunicator` as dicts.
    communicators: list[dict[str, Any]]


class StackList(TypedDict):
    """The stacks of a rank; the main thread's is the first."""

    #: The innermost line of the user's own code; empty where none runs.
    location: str
    #: The exception that the main thread handles, and the line that raised it.
    exception: tuple[str, str]
    #: The last exception that ended another thread, with the line; empty: none.
    thread_exception: str
    #: Their fields as lists: JSON has no named tuples.
    stacks: list[Stack]


class SampledStacks(TypedDict):
    """What the sampler of a rank saw."""

    seconds: float
    looks: int
    #: The name of the thread, the places of the calls in `frames`, and the seconds that
    #: the thread spent there.
    stacks: list[tuple[str, list[int], float]]
    #: As `Stacks.course`.
    course: list[tuple[int, int]]
    #: As in `StackList`.
    frames: list[Frame]


class Aborted(TypedDict):
    """The outcome of `Abort`."""

    #: Names of the groups that are aborted.
    groups: list[str]
    #: The rank's summary afterwards.
    summary: EncodedSummary


class Request(msgspec.Struct, Generic[A]):
    """A request that is answered with an `A`."""

    def content(self) -> dict[str, Any]:
        return {"op": type(self).__name__, "args": msgspec.structs.asdict(self)}

    @classmethod
    def handler(cls: type[R], method: Callable[[S, R], A]) -> Callable[[S, R], A]:
        """Decorate the method that serves the request; see `handlers_of`."""
        vars(method)["serves"] = cls
        return method


def handlers_of(*servers: object) -> dict[str, Callable[[Any], Any]]:
    """Return op → a function of a message's ``args``, for the handlers of `servers`."""
    return {
        kind.__name__: functools.partial(_serve, getattr(server, name), kind)
        for server in servers
        for name, method in vars(type(server)).items()
        if (kind := getattr(method, "serves", None)) is not None
    }


def _serve(handler: Callable[[R], Any], kind: type[R], args: Any) -> Any:
    return handler(msgspec.convert(args, kind))


class Abort(Request[Aborted]):
    """Abort groups, by id; ``None``: all.

    `by` is the author of the abort, `culprits` are the ranks that caused it, as far
    as they are known, and `dead` those that have died, if a death is the reason.
    `diagnosis` is why ops hung.
    """

    groups: Sequence[str] | None
    reason: str
    by: str
    culprits: Sequence[int] = msgspec.field(default_factory=list)
    dead: Sequence[int] = msgspec.field(default_factory=list)
    diagnosis: str = ""


class AnswerPrompt(Request[None]):
    """Give the debugger of the rank the line for the prompt that has `number`."""

    number: int
    line: str


class AssignRank(Request[GpuAnswer]):
    """Give the engine a rank, and the variables of its environment."""

    assignment: RankAssignment
    env: Mapping[str, str]
    owner: Client | None


class EndInit(Request[bool]):
    """End the `init_process_group` that the cell waits in; return whether it does."""

    reason: str
    culprits: Sequence[int]


class ExportGroups(Request[ExportedGroups]):
    """Describe the groups of the rank, for a fresh rank."""


class GetClock(Request[int]):
    """Return the time of the engine's clock, in ns."""


class GetFlightRecord(Request[dict[str, Any]]):
    """Return the flight recorder; `last`: at most so many records of it."""

    last: int | None


class GetHello(Request[Hello]):
    """Describe the engine."""


class GetNames(Request[dict[str, str]]):
    """Return the names that cells can use; see `agent.names_of`."""


class GetNcclReport(Request[NcclReport]):
    """Return the report of NCCL's RAS service on the rank's host."""


class GetStacks(Request[StackList]):
    """Return the stacks of the threads of the user, or with `every` of all threads."""

    every: bool


class GetStoreAddress(Request[StoreAddress]):
    """Return the address of the store that the rank hosts."""


class GetSummary(Request[EncodedSummary]):
    """Return the rank's summary."""


class HostStore(Request[StoreAddress]):
    """Open the store of all ranks on `host`, an address of the engine's host."""

    host: str


class ImportGroups(Request[list[str]]):
    """Make those of the exported groups that the rank is in; return their names."""

    exported: ExportedGroups


class InitGroup(Request[list[Refusal]]):
    """Make the default group; return the backends that cannot be used here."""

    backend: str | None
    timeout: float | None


class Interrupt(Request[bool]):
    """Interrupt the running cell; return whether there was one.

    Not once the cell that has `key` is over: the next one may run already.
    """

    key: str | None = None


class IsStoreLost(Request[bool]):
    """Return whether the rank has no connection to the store."""


class JoinStore(Request[None]):
    """Connect to the store that another rank hosts."""

    host: str
    port: int
    key: str


class NoteCauses(Request[None]):
    """Keep why ops hang, for the errors of those that time out.

    `found` has the text and the ranks at fault, by the id of the group.
    """

    found: Mapping[str, tuple[str, Sequence[int]]]


class PublishStatus(Request[EncodedSummary]):
    """Publish status for the next `lease` seconds; return the summary.

    For the ranks of a script; those of a cluster have `Subscribe`. Two messages are
    `interval` seconds apart at least. `attends`: a person looks, who reads a verdict
    where nobody needs a report of a hang.
    """

    lease: float
    interval: float
    attends: bool = True


class Rebuild(Request[EncodedSummary]):
    """Begin new generations of groups: id → generation; return the summary."""

    generations: Mapping[str, int]


class Release(Request[None]):
    """Give up the reservation `key`."""

    key: str


class Reserve(Request[Holder | None]):
    """Reserve the rank for a cell; return the holder if another client has the rank."""

    key: str
    client: Client
    cell: int | None


class SetEnvironment(Request[None]):
    """Set variables of the engine's environment."""

    env: Mapping[str, str]


class StartSampling(Request[None]):
    """Look at the stacks `rate` times a second, for `seconds`; see `TakeSamples`."""

    key: str
    seconds: float
    rate: float
    every: bool


class Subscribe(Request[EncodedSummary]):
    """Publish status under `header` for a while; return the summary."""

    header: dict[str, Any]
    interval: float = 0.0


class TakeSamples(Request[SampledStacks]):
    """End the sampling `key`, and return what was seen."""

    key: str


class Unsubscribe(Request[None]):
    """End the subscription whose header has `msg_id`."""

    msg_id: str


class YieldRank(Request[None]):
    """Have the rank for oneself no more."""
