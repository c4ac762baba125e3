"""ProcessGroup: several backends behind one dispatch point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType

from ..interface.base import Backend
from ..quantities import as_positive_seconds
from ..stores.base import Store
from ..work.flight_recorder import GroupCounters, recorder
from ..work.op_type import OpType
from .abort_reason import AbortReason, Departure
from .config import BackendConfig
from .dispatch import Dispatcher
from .generation import Generation
from .key import GroupKey
from .remedies import ANEW_HINT
from .spec import GroupSpec, Origin
from .summary import GroupStatus, summarize
from .suspension import memory_stats, resume, suspend

__all__ = ["ProcessGroup"]


class ProcessGroup(Dispatcher):  # numpydoc ignore=PR01
    """A set of ranks with one :class:`Backend` per device type.

    Programs do not call the class: `init_process_group` makes the default group, and
    `new_group`, `split_group` and `shrink_group` make others. Backends are built at the
    first use of their device type, so that a group whose config names a library that is
    not installed works until an array of that device type is used.

    The arguments of the methods that Rankscope itself calls:

    - `device`: a device type, such as ``"cpu"``.
    - `op_type`: the op, for messages.
    - `index`: the number of a CUDA device.
    - `enabled`: whether Works are timed.
    - `batch`: what `capture` has collected.
    - `peer`: the root, or the other side, as its rank in the group.

    Notes
    -----
    Named after ``torch.distributed.ProcessGroup``, whose methods start the ops too:
    `allreduce` and the others return a Work, and do what the functions do with
    ``async_op=True``.

    Examples
    --------
    >>> group = dist.new_group([0], group_desc="mine")
    >>> group.rank(), group.size(), group.ranks
    (0, 1, [0])
    >>> x = np.ones(2)
    >>> group.allreduce([x]).wait()
    True
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        global_rank: int,
        config: BackendConfig,
        store: Store,
        timeout: float,
        generation: int = 0,
        origin: Origin | None = None,
        ended: Mapping[int, Departure] = MappingProxyType({}),
    ) -> None:
        """Make this rank's part of a group; an op has `timeout` seconds."""
        spec = GroupSpec(name, ranks, global_rank, config, timeout)
        # The ranks of a later generation may be other processes: it has no origin.
        super().__init__(spec, Generation(spec, generation, store, origin=origin))
        self._root_store = store
        # Held while a rebuild replaces the generation, before any of its locks.
        self._rebuild_lock = threading.Lock()
        # Generations before the current one that were aborted.
        self._aborts = 0
        self._ended = ended
        self._destroyed = False

    # -- what it is --------------------------------------------------------

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._spec.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._spec.size

    def name(self) -> str:
        """Return the backend of the group's first device type, as c10d does."""
        return self._spec.config.device_backend_map[self.first_device()]

    @property
    def group_name(self) -> str:
        """What identifies the group on every rank: its name and a hash of the ranks."""
        return self._spec.key.id

    @property
    def group_desc(self) -> str:
        """The name that messages and the board show: the ``group_desc`` of new_group.

        ``'default'`` is that of the default group; without a ``group_desc``, the
        ranks.
        """
        return self._spec.name

    @property
    def bound_device_id(self) -> int | None:
        """The CUDA device that ``device_id`` bound the group to; ``None``: none."""
        return self._spec.device

    @property
    def key(self) -> GroupKey:
        """What identifies the group on every rank."""
        return self._spec.key

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group, by rank in the group."""
        return self._spec.ranks

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self._spec.global_rank

    @property
    def config(self) -> BackendConfig:
        """The backend of each device type."""
        return self._spec.config

    @property
    def timeout(self) -> float:
        """Seconds after which an op is timed out, counted from its start."""
        return self._spec.timeout

    @property
    def abort_hooks(self) -> dict[int, Callable[[], None]]:
        """By number: functions that an abort calls before the ops in flight end.

        They are called on a thread of their own, and hold up the abort on this rank
        alone, for at most 10 s. An error of theirs is logged.
        """
        return self._spec.abort_hooks

    @property
    def rebuild_hooks(self) -> dict[int, Callable[[], None]]:
        """By number: functions that `rebuild` calls at its end, on this rank alone."""
        return self._spec.rebuild_hooks

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set the timeout of the ops that are issued from now on; on this rank.

        Parameters
        ----------
        timeout : float or timedelta
            Counted from an op's start; in seconds if it is a number.

        Raises
        ------
        TypeError, ValueError
            It is no duration, or not positive.
        """
        self._spec.timeout = as_positive_seconds(
            timeout, f"set_timeout on {self.describe()}: timeout"
        )

    def get_group_store(self) -> Store:
        """Return the store of the current generation, as c10d's method does."""
        return self._current.store

    def describe(self) -> str:
        """Return ``group 'default' on rank 2``, for messages."""
        return self._spec.describe()

    def first_device(self) -> str:
        """Return the device type that ops without an array go to."""
        return next(iter(self.config.device_backend_map))

    def unused_generation(self) -> int | None:
        """Return the generation if this rank has issued no op in it."""
        return None if self.status.op_id else self.generation

    def summary(self) -> GroupStatus:
        """Return where this rank is in the group."""
        return summarize(self._spec, self._current, self._aborts)

    def __repr__(self) -> str:
        state = "" if self.aborted is None else f", aborted: {self.aborted}"
        return (
            f"<ProcessGroup {self.group_desc!r}: rank {self.global_rank} of "
            f"{self.ranks}, {self.config}{state}>"
        )

    # -- its life ----------------------------------------------------------

    @property
    def current(self) -> Generation:
        """The generation that ops are issued in; a rebuild replaces it."""
        return self._current

    @property
    def generation(self) -> int:
        """How often the group was rebuilt."""
        return self._current.number

    @property
    def status(self) -> GroupCounters:
        """Counters and Works in flight of the current generation."""
        return self._current.status

    @property
    def store(self) -> Store:
        """The store of the current generation."""
        return self._current.store

    @property
    def aborted(self) -> AbortReason | None:
        """Why the group was aborted; ``None`` while it is usable.

        Its `text` says why, `by` who did it, `at` when (``time.time()``), `diagnosis`
        why its ops hung, if that was found, `culprits` which global ranks are the
        cause; ``str`` of it is a sentence.
        """
        return self._current.aborted

    def backends(self) -> list[Backend]:
        """Return the backends that were built so far."""
        return list(self._current.backends.values())

    def built_backend(self, device: str) -> Backend | None:
        """Return the backend of `device`, or ``None`` before its first use."""
        return self._current.backends.get(device)

    def backend_for(self, device: str, op_type: OpType | None = None) -> Backend:
        """Return the backend of `device`, which is built at the first call.

        Raises
        ------
        ValueError
            The group has no backend for the device type.
        DistError
            The group is aborted, or the backend cannot be built.
        """
        return self._current.backend_for(device, op_type)

    def connect(self, index: int) -> None:
        """Prepare, before any op, what ops on a CUDA device will need."""
        self.backend_for("cuda").prepare(index=index)

    def enable_timing(self, enabled: bool) -> None:
        """Time the Works that are made from now on, or do not."""
        self._current.set_timing(enabled)

    def abort(
        self, reason: str = "", *, by: str = "", culprits: Sequence[int] = ()
    ) -> None:
        """Fail the ops in flight and stop the backends, here and on every rank.

        Every Work in flight ends as ABORTED with `reason`; ops issued later raise it.
        Returns at once, whatever the backends hang in; the other ranks read the reason
        in the store. Does nothing if the group is aborted.

        Parameters
        ----------
        reason : str, optional
            Why; the errors on all ranks say it.
        by : str, optional
            Who aborts; the default is this rank.
        culprits : sequence of int, optional
            The global ranks that are the cause, as far as they are known.

        Examples
        --------
        >>> group = dist.new_group([0])
        >>> group.abort("the loss is NaN")
        >>> try:
        ...     dist.barrier(group)
        ... except dist.DistAbortedError as error:
        ...     print(error.reason)
        the loss is NaN
        """
        reason = reason or "ProcessGroup.abort()"
        self._current.abort(reason, by=by, culprits=culprits)

    def rebuild(
        self, generation: int | None = None, store: Store | None = None
    ) -> None:
        """Begin a new generation: same name and ranks, fresh backends, seq from 0.

        Local and immediate; every rank of the group has to do it, with the same
        `generation`. Works of the old generation stay as they ended.

        Parameters
        ----------
        generation : int, optional
            The number of the new generation; the default is the next one. Given, it
            begins on all ranks: those that had left are back.
        store : Store, optional
            Replaces the group's store.

        Raises
        ------
        ValueError
            The group was destroyed.

        Examples
        --------
        >>> group = dist.new_group([0])
        >>> group.abort("to try it")
        >>> group.rebuild()
        >>> group.aborted, group.generation
        (None, 1)
        """
        self._check_exists("rebuild")
        while not self._replace(self._current, generation, store):
            pass  # another thread has rebuilt the group meanwhile
        recorder.changed()
        for hook in list(self.rebuild_hooks.values()):
            hook()

    def _replace(
        self, old: Generation, number: int | None, store: Store | None
    ) -> bool:
        aborted = old.aborted is not None
        # Outside of the lock: callbacks of Works may rebuild, too.
        old.abort("the group was rebuilt", publish=False)
        with self._rebuild_lock:
            if self._current is not old:
                return False
            # Else the former one may be gone.
            same_store = store in (None, self._root_store)
            self._root_store = store or self._root_store
            self._aborts += aborted
            since = old.since
            if number is None:
                number = old.number + 1
            else:
                since = number
            self._current = Generation(
                self._spec, number, self._root_store, since=since, timing=old.timing
            )
        self.note_ended()
        if same_store:
            old.forget(for_good=False)
        return True

    def note_ended(self) -> None:
        """Take in which ranks of the job have ended."""
        for departure in list(self._ended.values()):
            if departure.rank in self.ranks and self.key.id not in departure.told:
                current = self._current
                current.note_departure(replace(departure, generation=current.number))

    def suspend(self) -> None:
        """Free the device memory that the group's communicators hold while it is idle.

        Every rank of the group has to call it. Blocks until the ops in flight have
        ended and every rank has come. Ops on a suspended device type raise
        `DistBackendError` before they have a number, until `resume` on every rank.
        The nccl backend can be suspended, with NCCL 2.29.7 or later; the other
        backends of the group go on.

        Raises
        ------
        NotImplementedError
            No backend of the group can be suspended; the message says what is lacking.
        DistBackendError
            The group is suspended.
        DistTimeoutError
            Ranks did not come within the timeout; the message names them. The group is
            then aborted, as it is after an error of NCCL.
        """
        suspend(self._current)

    def resume(self) -> None:
        """Allocate what `suspend` freed, on every rank; the group takes ops again.

        Blocks as `suspend` does.

        Raises
        ------
        NotImplementedError, DistBackendError, DistTimeoutError
            As `suspend` raises them.
        """
        resume(self._current)

    def memory_stats(self) -> dict[str, int]:
        """Return how much device memory the group's communicators hold on this rank.

        The names are those of c10d's ``Backend.memory_stats``.

        Returns
        -------
        dict of str to int
            ``suspend`` is what :meth:`suspend` can free, ``persist`` what it cannot,
            ``total`` both, in bytes; ``suspended`` is the number of suspended
            communicators.

        Raises
        ------
        NotImplementedError
            As :meth:`suspend` raises it.
        """
        return memory_stats(self._current)

    def _check_exists(self, what: str) -> None:
        if self._destroyed:
            raise ValueError(
                f"{what} of {self.describe()}: the group was destroyed; {ANEW_HINT}"
            )

    def shutdown(self) -> None:
        """Free the backends in good order; abort if ops are still in flight."""
        self._destroyed = True
        self._current.shutdown()
