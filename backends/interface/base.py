"""Backend: the base class of every communication library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..errors import DistError
from ..work.composite import chain
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from . import fusion
from .registration import BackendCreator, LauncherRendezvous, Registration

__all__ = ["INTERFACE_VERSION", "Array", "Backend", "Reduction"]

#: The version of the interface below: raised by a change that an existing
#: subclass of `Backend` would have to follow.
INTERFACE_VERSION = 1

# The arrays that a backend gets: numpy's for "cpu", cupy's for "cuda", and for a device
# type without an array library in Rankscope the caller's own.
Array = Any

#: The reduction that a method gets: what `Backend.check` of the backend returned, a
#: `ReduceOp` unless the backend translates it.
Reduction = Any


class Backend:
    """One communication library, serving one group on this rank.

    A subclass is made by its registered creator,
    ``creator(store, rank, world_size, timeout)``, at the group's first use of
    one of its device types. Making it may rendezvous through `store`, whose
    keys are private to this group, generation and backend.

    A subclass calls ``super().__init__(rank, size)`` and defines the methods
    its library has. The others raise `NotImplementedError`, or are built from
    those: reduce_scatter, the ``_tensor`` forms, AVG and coalesced ops.

    Contract for the collective methods. They are called from any thread, one at a time,
    in issue order. Arguments have been validated by the dispatcher: arrays are
    C-contiguous, writable where they are written, of one dtype, of matching sizes and
    not all empty, except those of a send, a receive or an all_to_all; `src` and `dst`
    are ranks *in the group*. A method that raises `TypeError` or `ValueError` has not
    taken the op: the op gets no number, and the group goes on. Where it can, a backend
    refuses arguments earlier, in :meth:`check` and :meth:`check_message`. A method
    returns a :class:`Work` at once and never blocks on a peer. The backend keeps what
    it uses alive until the Work is over, runs ops in the order of issue, and reports
    each start and end. Deadlines are not its task: the dispatcher times ops out and
    then calls :meth:`abort`. It writes to no array whose Work is over, however it
    ended.

    The arguments of the ops:

    - `tensor`, `tensors`: the array of this rank; one for each op of a coalesced call.
    - `output`, `outputs`, `output_list`: written; a list has an array for each rank.
    - `tensor_list`, `tensor_lists`: written, as such a list, or one for each op.
    - `gather_list`, `scatter_list`: a list as well; ``None`` on ranks but the root.
    - `input_list`: read; an array for each rank.
    - `output_split_sizes`: how many rows of `output` come from each rank.
    - `input_split_sizes`: how many rows of `tensor` go to each rank.
    - `op`: what `check` returned; of a coalesced call, the `ReduceOp`.
    - `src`, `dst`: the source or the destination; a receive with ``None``: any rank.
    - `tag`: a receive matches the sends with its tag.

    A failure that the library reports goes to `on_failure` first, with the reason,
    and to the Work then.

    A connection that a peer closes, or that breaks, is reported as a
    `ConnectionLostError`, with the peer's rank in the group if the library names
    it: to `on_failure`, as the error of the Work, or raised by the op's method. The
    backend reports it at once; the reason why the peer closed it arrives later,
    through the store: the peer died, or its group was aborted. So the group keeps
    its ops in flight for up to 2 s. It then aborts with that reason on every rank,
    or, if none has come, with "rank 0 lost the connection to rank 1". While no op is
    in flight a lost connection aborts nothing: the peer may have destroyed its group.

    The easy way to fulfil the contract: one thread per backend,
    ``ThreadPoolExecutor(1)``, and `create_work_from_call` for each op. Waits on
    `store` end when `store` is closed, so that is what :meth:`abort` does; then it
    waits for the thread, which may still write to an array.

    Notes
    -----
    Named after ``torch.distributed.Backend``, whose registry and names it has too:
    ``Backend("GLOO")`` is ``"gloo"``. ``docs/conformance.md`` is about the suite that
    tries a backend.

    Examples
    --------
    >>> dist.Backend("GLOO"), dist.Backend.NCCL
    ('gloo', 'nccl')
    """

    #: The names of c10d's backends; `register_backend` adds others.
    UNDEFINED: ClassVar[str] = "undefined"
    GLOO: ClassVar[str] = "gloo"
    MPI: ClassVar[str] = "mpi"
    NCCL: ClassVar[str] = "nccl"

    registry: ClassVar[dict[str, Registration]] = {}

    #: The version of this interface that a subclass is written for. A subclass
    #: states the number itself; one that states none is of version 1, whatever
    #: `INTERFACE_VERSION` is. A group refuses a backend of another version.
    interface_version: int = 1
    #: The name it is registered by; set when the group makes the backend.
    name: str = "backend"
    #: Reductions the library has; AVG is made of SUM where it is not listed.
    reduce_ops: frozenset[ReduceOp] = frozenset(
        {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX}
    )
    #: Whether a message may arrive before it is received, and its sender leave.
    buffers_messages = True
    #: Tags of messages that the dispatcher itself sends: :meth:`check_message` may
    #: refuse them where the caller chooses one.
    private_tags: range = range(1 << 30, (1 << 30) + 256)
    #: Whether a rank that closes it fails what others have in flight with third ranks:
    #: a rank that leaves the group then waits for the others to leave.
    lingers = False
    #: Set by the group, for messages: ``group 'default' on rank 2``.
    place: str = "no group"
    #: Whether it has `split_from`.
    supports_split = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # c10d's Backend is a str: Backend("GLOO") is the name "gloo".
        if cls is Backend and len(args) == 1 and isinstance(args[0], str):
            return args[0].lower()
        return super().__new__(cls)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        #: Set by the group: the global rank of each rank in the group.
        self.global_ranks: Sequence[int] = range(size)
        #: Set by the group: call it with a reason when the library, a peer or
        #: a side process fails on its own. The group is then aborted everywhere.
        #: The reason is a sentence, or a `DistError`: its `culprits`, ranks in the
        #: group, become those of the abort. Returns at once.
        self.on_failure: Callable[[str | DistError], None] = lambda reason: None
        #: Set by the group: whether the Works made now are timed. To be looked
        #: at where timing an op costs something, as on a GPU.
        self.timing = True

    # -- registry ----------------------------------------------------------

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: BackendCreator,
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
        unavailable: Callable[[], str | None] = lambda: None,
        *,
        launcher: str | None = None,
        rendezvous: LauncherRendezvous | None = None,
        on_init: Callable[[], None] = lambda: None,
        has_options: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make `name` usable in a `BackendConfig`, for the device types `devices`.

        Registering a name again replaces it for groups made from then on. It is known
        in this process only. A rank that ``%dist_restart`` replaces joins the groups
        of the others, and at the first op of a group imports the module of `func`:
        one that registers when it is imported, or an entry point, needs no more. What
        a cell has registered, the cell has to register there again.

        As ``torch.distributed.Backend.register_backend``; what comes after `devices` is
        Rankscope's own.

        Parameters
        ----------
        name : str
            An identifier, which becomes lower-case, and an attribute of this class
            in upper case (``Backend.MINE``).
        func : callable
            ``func(store, rank, world_size, timeout)`` returns the backend of
            this rank; `timeout` is the group's, in seconds.
        extended_api : bool, default False
            Whether `func` is called as ``func(options, None)``, with what c10d calls
            `DistributedBackendOptions`: the arguments above under other names, and
            the group.
        devices : str or sequence of str, optional
            The device types the backend serves; default: ``"cpu"`` and ``"cuda"``.
        unavailable : callable, optional
            Returns why the library cannot be used on this machine, as a sentence
            with the remedy; ``None`` if it can.
        launcher : str, optional
            The launcher of the cluster that has to start the ranks, such as
            ``"mpi"``; ``None``: any launcher.
        rendezvous : callable, optional
            Called by ``init_process_group`` where the environment names no
            address of rank 0: ``rendezvous(timeout, key)`` returns a store, this
            rank and the world size as the launcher knows them, or ``None`` if the
            launcher did not start this process.
        on_init : callable, optional
            Called in every process that makes its default group after this call,
            whichever backends that group has. Must not block.
        has_options : callable, optional
            Whether options of this backend are set in the current context. The
            creator runs in the context of the group's first use if so, else in a
            copy of the context that made the group.

        Raises
        ------
        ValueError
            `name` is not an identifier, or `devices` is empty.
        TypeError
            `extended_api` is no bool: `devices` comes after it.

        Examples
        --------
        >>> class Mine(dist.Backend):
        ...     def all_reduce(self, tensor, op):  # one rank: nothing to add
        ...         return dist.Work(dist.OpType.ALL_REDUCE).finish(True)
        >>> def make(store, rank, world_size, timeout):
        ...     return Mine(rank, world_size)
        >>> dist.Backend.register_backend("mine", make, devices="cpu")
        >>> dist.BackendConfig("mine")
        BackendConfig('cpu:mine')
        """
        if not name.isidentifier():
            raise ValueError(
                f"backend name {name!r}: expected an identifier such as 'mine'"
            )
        name = name.lower()
        if not isinstance(extended_api, bool):
            raise TypeError(
                f"register_backend: extended_api is {extended_api!r}; expected a bool "
                "(device types: devices='cpu')"
            )
        if devices is None:
            devices = ("cpu", "cuda")
        kinds = (devices,) if isinstance(devices, str) else tuple(devices)
        if not kinds:
            raise ValueError(f"backend {name!r}: devices is empty, expected e.g. 'cpu'")
        cls.registry[name] = Registration(
            name,
            func,
            kinds,
            unavailable,
            launcher,
            rendezvous,
            on_init,
            has_options,
            extended_api,
        )
        if not hasattr(Backend, name.upper()):
            setattr(Backend, name.upper(), name)

    def refresh(self) -> None:
        """Bring the states of Works in flight up to date.

        Called before a status summary and by the watchdog: a backend that
        does not report each start as it happens does so here. Never blocks.
        """

    def state(self) -> str:
        """Return the state of the connections as text, for the board; may be empty."""
        return ""

    def transports(self) -> Mapping[int, tuple[str, ...]]:
        """Return the transports to the ranks that this one has connected to.

        The board shows them. Called before each status summary; never blocks.

        Returns
        -------
        mapping of int to tuple of str
            By rank in the group, names such as ``("shm", "cma")``, sorted in the same
            way on all ranks; empty if the library does not name them.
        """
        return {}

    def default_device(self) -> int | None:
        """Return the device index for arrays without one; ``None``: no index."""
        return None

    # -- checks, called by the dispatcher ------------------------------------

    def check(
        self, op: OpType, dtype: Any, reduce_op: ReduceOp | None
    ) -> Reduction | None:
        """Refuse an op that the backend cannot do; return the reduction of its method.

        The dispatcher calls this method once for each op that has arrays, before the
        op gets its sequence number: a refused op is not counted and not recorded.
        Nothing about the reduction has to be determined again when the op starts.

        Parameters
        ----------
        op : OpType
            The type of the op.
        dtype : dtype
            The dtype of its arrays.
        reduce_op : ReduceOp or None
            The reduction; ``None`` for an op that only moves elements. AVG becomes SUM
            before the call where `reduce_ops` has no AVG: the dispatcher divides.

        Returns
        -------
        Reduction or None
            What the method of the op gets as its last argument: here `reduce_op`
            itself, in a backend that translates the reduction (into codes of its
            library, for instance) the translation. ``None`` if and only if `reduce_op`
            is ``None``. A method of `Backend` that is made of another method passes
            its reduction on to that one. The coalesced methods get a `ReduceOp`,
            because their arrays may differ in dtype, and call `check` for each dtype.

        Raises
        ------
        ValueError
            The backend does not have the reduction for any dtype.
        TypeError
            The backend does not have the op, or the reduction, for `dtype`.
        """
        if reduce_op is None or reduce_op in self.reduce_ops:
            return reduce_op
        had = {one.name for one in self.reduce_ops}
        if "SUM" in had:  # AVG is made of it
            had.add("AVG")
        raise ValueError(
            f"{op.value} in {self.place}: "
            f"backend {self.name!r} has no ReduceOp.{reduce_op.name}; it "
            f"has {', '.join(sorted(had))}{_ELSEWHERE.get(reduce_op.name, '')}"
        )

    # -- collectives -------------------------------------------------------

    def all_reduce(self, tensor: Array, op: Reduction) -> Work:
        """Reduce `tensor` over all ranks, in place, on every rank."""
        self._missing("all_reduce")

    def broadcast(self, tensor: Array, src: int) -> Work:
        """Copy `tensor` of rank `src` into `tensor` of every other rank."""
        self._missing("broadcast")

    def reduce(self, tensor: Array, dst: int, op: Reduction) -> Work:
        """Reduce over all ranks into `tensor` of rank `dst`; others keep theirs."""
        self._missing("reduce")

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        """Set ``tensor_list[r]`` to `tensor` of rank r; sizes may differ by rank."""
        self._missing("all_gather")

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work:
        """Set `output`, flat, to the concatenation of all ranks' `tensor`."""
        return self.all_gather(_chunks(output, self.size), tensor)

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        """Set ``gather_list[r]`` on rank `dst` to `tensor` of rank r."""
        self._missing("gather")

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        """Set `tensor` to ``scatter_list[rank]`` of rank `src`."""
        self._missing("scatter")

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Reduction
    ) -> Work:
        """Set `output` to the reduction of all ranks' ``input_list[rank]``.

        Built on all_reduce of one flat copy; entries may differ in size.
        """
        flat = np.concatenate([np.ravel(entry) for entry in input_list])
        start = sum(entry.size for entry in input_list[: self.rank])

        def take() -> None:
            output.reshape(-1)[:] = flat[start : start + output.size]

        return chain(
            self.all_reduce(flat, op), OpType.REDUCE_SCATTER, take, result=output
        )

    def reduce_scatter_tensor(
        self, output: Array, tensor: Array, op: Reduction
    ) -> Work:
        """Do `reduce_scatter`, `tensor` being the flat concatenation of the parts."""
        return self.reduce_scatter(output, _chunks(tensor, self.size), op)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        """Set ``output_list[r]`` to ``input_list[rank]`` of rank r; sizes vary."""
        self._missing("all_to_all")

    def all_to_all_single(
        self,
        output: Array,
        tensor: Array,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
    ) -> Work:
        """Do `all_to_all` on one array each, split along dimension 0."""
        return self.all_to_all(
            _split(output, output_split_sizes), _split(tensor, input_split_sizes)
        )

    # -- coalesced: many small ops for the price of one --------------------

    def all_reduce_coalesced(self, tensors: Sequence[Array], op: ReduceOp) -> Work:
        """Do `all_reduce` of each of `tensors`; here, of one flat copy per dtype."""
        return fusion.all_reduce(self, tensors, op)

    def all_gather_coalesced(
        self, tensor_lists: Sequence[Sequence[Array]], tensors: Sequence[Array]
    ) -> Work:
        """Do `all_gather` of each pair; here, of one flat copy per dtype."""
        return fusion.all_gather(self, tensor_lists, tensors)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array]
    ) -> Work:
        """Do `all_gather_into_tensor` of each pair; here, of a flat copy per dtype."""
        return fusion.all_gather_into_tensor(self, outputs, tensors)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
    ) -> Work:
        """Do `reduce_scatter_tensor` of each pair; here, of one flat copy per dtype."""
        return fusion.reduce_scatter_tensor(self, outputs, tensors, op)

    def coalescing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the calls of one batch of sends and receives."""
        return contextlib.nullcontext()

    def barrier(self) -> Work:
        """End when every rank has entered."""
        self._missing("barrier")

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        """Send `tensor` to rank `dst`, matched by `tag`."""
        self._missing("send")

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        """Receive into `tensor` from `src`; the result is the sender's group rank."""
        self._missing("recv")

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        """Refuse a send or receive that the library cannot match, as by its tag.

        Called before the op has a number, so that only the caller is concerned.

        Parameters
        ----------
        op : OpType
            ``SEND`` or ``RECV``.
        peer : int or None
            The other side, as its rank in the group; ``None``: a receive from any rank.

        Raises
        ------
        ValueError
            The library cannot send or receive with `tag`, or not from any rank.
        """

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        """Begin to connect this rank, because ops of other ranks may need it.

        Called where the first op of this rank does not reach the backend: its arrays
        are empty, or it is one that not every rank takes part in. For a backend
        that connects all ranks at the first op instead of when it is made. Never
        blocks on a peer.

        Parameters
        ----------
        arrays : sequence of array, optional
            Those of the op.
        index : int, optional
            The number of the device, if one is given.
        """

    def split_from(
        self,
        parent: Backend | None,
        excluded: Sequence[int],
        release: Callable[[], None] | None,
    ) -> None:
        """Derive this backend's communicators from those of `parent`, if it can.

        Called once, before any op, on every rank of this group, which has the ranks of
        the parent's without `excluded`, in order. The parent may be busy or broken on
        some ranks, so the ranks have to agree.

        Parameters
        ----------
        parent : Backend or None
            This rank's backend of the group that this group is made from, ``None``
            where it was never used.
        excluded : sequence of int
            Ranks of the parent's group that are not in this one.
        release : callable or None
            With it, ops in flight on the parent may be aborted; it is to be called,
            from any thread, once the parent is no longer needed.
        """

    # -- memory while idle ---------------------------------------------------

    def suspend_lacks(self) -> str:
        """Return why the next three cannot be called, with the remedy; empty: they can.

        They are called by every rank, in the same order among themselves and the ops.
        """
        return f"backend {self.name!r} does not implement suspend"

    def suspend(self) -> None:
        """Free device memory that only ops need; no op is issued before `resume`.

        Blocks until the ops in flight have ended, and every rank has suspended, for
        the timeout of the group. The group is aborted if this raises.
        """
        self._missing("suspend")

    def resume(self) -> None:
        """Allocate what `suspend` freed; blocks until every rank has resumed."""
        self._missing("resume")

    def memory_stats(self) -> dict[str, int]:
        """Return sizes of device memory by name; see `ProcessGroup.memory_stats`."""
        self._missing("memory_stats")

    # -- end of life -------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Stop everything in flight, now, whatever it hangs in; never block on a peer.

        The dispatcher fails the Works itself. Calling it again does nothing.

        Parameters
        ----------
        reason : str
            Why, for messages.
        """

    def shutdown(self) -> None:
        """Free everything in good order: no op is in flight and none will come."""

    def _missing(self, op: str) -> NoReturn:
        raise NotImplementedError(f"backend {self.name!r} does not implement {op}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"


_BITWISE = "; of the backends that come with Rankscope tcp, mpi and ucx have it"
# What to do about a reduction that most backends lack, by its name: PREMUL_SUM has
# a class of its own.
_ELSEWHERE = {
    **dict.fromkeys(("BAND", "BOR", "BXOR"), _BITWISE),
    "PREMUL_SUM": "; PREMUL_SUM needs a factor, op=make_nccl_premul_sum(0.5), and SUM",
}


def _chunks(tensor: Array, parts: int) -> list[Array]:
    flat = tensor.reshape(-1)
    size = flat.size // parts
    return [flat[i * size : (i + 1) * size] for i in range(parts)]


def _split(tensor: Array, sizes: Sequence[int]) -> list[Array]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tensor[start : start + size])
        start += size
    return pieces
