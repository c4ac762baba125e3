"""The coalescing manager: ops are captured in Python and issued once, at exit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from ..devices.arrays import check_list, device_type
from ..groups.membership import Group, member_group, resolve_group
from ..groups.process_group import ProcessGroup
from ..groups.spec import NonGroupMember
from ..quantities import as_list
from ..work.composite import join
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .arguments import Array, Place, take_peer, take_tag
from .data_movement import all_gather, all_gather_into_tensor
from .point_to_point import irecv, isend
from .reductions import all_reduce, reduce_scatter_tensor

__all__ = [
    "CoalescingManager",
    "P2POp",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced",
    "batch_isend_irecv",
    "coalescing_manager",
    "reduce_scatter_tensor_coalesced",
]


class CoalescingManager:
    """The batch of one `coalescing_manager` block, which makes it.

    `works` are the Works that the backends returned at the end of the block: one for
    each run of ops that became one call; of a block inside another one those of its
    ops, which the outer block issues.

    Parameters
    ----------
    group : ProcessGroup
        The group of the ops.

    Examples
    --------
    >>> with dist.coalescing_manager(async_ops=True) as batch:
    ...     _ = dist.all_reduce(np.ones(2), async_op=True)
    >>> batch.wait(), len(batch.works)
    (True, 1)
    """

    def __init__(self, group: ProcessGroup | NonGroupMember) -> None:
        self.group = group
        self.works: list[Work] = []
        self._work: Work | None = None

    @property
    def work(self) -> Work:
        """One Work for the whole batch; that of an empty batch is completed."""
        if self._work is None:
            self._work = (
                self.works[0]
                if len(self.works) == 1
                else join(self.works, OpType.COALESCED)
            )
        return self._work

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the whole batch, as `Work.wait` does.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Bounds this wait, in seconds if it is a number.

        Returns
        -------
        bool
            ``True``.

        Raises
        ------
        DistTimeoutError, DistAbortedError, DistBackendError
            As `Work.wait` raises them.
        """
        return self.work.wait(timeout)

    def is_completed(self) -> bool:
        """Return whether the whole batch is over."""
        return self.work.is_completed()

    def __repr__(self) -> str:
        group = self.group
        name = group.group_desc if isinstance(group, ProcessGroup) else group
        return f"<CoalescingManager of {name!r}: {self.works}>"


@contextlib.contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Coalesce the ops that this thread issues on `group` within the block.

    Ops are checked where they are written and issued at the end of the block,
    in order: runs of all_reduce (of one reduction), all_gather,
    all_gather_into_tensor and reduce_scatter_tensor as one backend call each,
    sends and receives as one batch. The whole batch has one sequence number,
    each op its ``op_id``.

    ``async_ops=True``: wait for the batch with ``cm.wait()``; else the end of
    the block waits. An op inside the block returns before it has started, without
    ``async_op=True``, too; the Work that it returns with it may be waited for after
    the block. If the body raises, nothing is issued. A block inside a block on the
    same group joins it; ops on another group go their usual way.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    device : object, optional
        Not used: accepted for c10d's signature.
    async_ops : bool, default False
        Whether the end of the block returns at once, before the batch is over.

    Yields
    ------
    CoalescingManager
        The batch: ``wait()``, ``is_completed()``, and the Works after the block.

    Raises
    ------
    TypeError, ValueError
        At the line of the block: `group` is no group, or there is no default group. At
        the line of an op that is wrong, as the op raises it; nothing is issued then.
    NotImplementedError
        At the end of the block: the backend does not have an op.
    DistTimeoutError, DistAbortedError, DistBackendError
        At the end of the block, or from ``cm.wait()``: the batch failed.

    Examples
    --------
    >>> x, y = np.ones(2), np.ones(3)
    >>> with dist.coalescing_manager() as cm:
    ...     _ = dist.all_reduce(x, async_op=True)
    ...     _ = dist.all_reduce(y, async_op=True)
    >>> x, y, len(cm.works)
    (array([1., 1.]), array([1., 1., 1.]), 1)
    """
    if isinstance(group, NonGroupMember):
        # Each op inside warns, and does nothing.
        yield CoalescingManager(group)
        return
    pg = resolve_group(group, "coalescing_manager")
    manager = CoalescingManager(pg)
    with pg.capture() as batch:
        yield manager
    if pg.capturing:  # the outer block issues it
        manager.works = list(batch)
        return
    manager.works = pg.issue_batch(batch)
    if async_ops:
        manager.work.detach()
    else:
        manager.wait()


class P2POp:
    """One send or receive of `batch_isend_irecv`.

    Parameters
    ----------
    op : callable
        :func:`isend` or :func:`irecv`.
    tensor : array
        What is sent, or where to.
    peer : int, optional
        The other side, as its rank in the world.
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    tag : int, default 0
        As for `op`.
    group_peer : int, optional
        The other side, as its rank in the group; in the place of `peer`. Afterwards
        both attributes have their values.

    Raises
    ------
    ValueError
        `op` is another function; `peer` and `group_peer` are both given, or neither is,
        or name no rank of the group, or this rank itself; `tag` is not from 0 to
        2147483647; this rank is not in the group; there is no default group, and
        `group` is ``None``.
    TypeError
        `tensor` is no array, `group` no group, or a rank or the tag no integer.

    Examples
    --------
    >>> mine, theirs = np.full(2, float(dist.get_rank())), np.zeros(2)
    >>> other = 1 - dist.get_rank()
    >>> ops = [dist.P2POp(dist.isend, mine, other)]
    >>> ops += [dist.P2POp(dist.irecv, theirs, other)]
    >>> ops[0].peer == other
    True
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Array,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"P2POp: op is {op!r}; expected isend or irecv")
        pg = resolve_group(group, "P2POp")
        device_type(tensor, "tensor", Place("P2POp", pg))
        self.op = op
        self.tensor = tensor
        self.group = pg
        self.group_peer = take_peer(pg, peer, group_peer, "peer", "P2POp", itself=False)
        self.peer = pg.ranks[self.group_peer]
        self.tag = take_tag(tag, "P2POp", pg)

    def __repr__(self) -> str:
        return (
            f"<P2POp {self.op.__name__} {self.peer} in {self.group.group_desc!r}, "
            f"tag {self.tag}>"
        )


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Issue sends and receives of one group as one batch.

    The semantics are those of ``torch.distributed.batch_isend_irecv``.

    Parameters
    ----------
    p2p_op_list : sequence of P2POp
        At least one; all of one group. Their order does not matter: a batch cannot
        deadlock with those of the peers.

    Returns
    -------
    list of Work
        One for each of `p2p_op_list`, in its order. The data of an op is there when
        ``wait()`` of its Work has returned.

    Raises
    ------
    ValueError
        `p2p_op_list` is empty, has anything but `P2POp`, or ops of two groups; or as
        `isend` and `irecv` raise it for an array, for a tag, or for a receive from any
        rank. Nothing is issued.
    TypeError
        As `isend` and `irecv` raise it. Nothing is issued.
    NotImplementedError, DistError
        As from `isend` and `irecv`.

    Examples
    --------
    >>> mine, theirs = np.full(2, float(dist.get_rank())), np.zeros(2)
    >>> other = 1 - dist.get_rank()
    >>> ops = [dist.P2POp(dist.isend, mine, other)]
    >>> ops += [dist.P2POp(dist.irecv, theirs, other)]
    >>> for work in dist.batch_isend_irecv(ops):
    ...     assert work.wait()
    >>> bool((theirs == other).all())
    True
    """
    ops = as_list(p2p_op_list, "batch_isend_irecv: p2p_op_list", "P2POps")
    if not ops or not all(isinstance(op, P2POp) for op in ops):
        raise ValueError(
            f"batch_isend_irecv: p2p_op_list is {p2p_op_list!r}; expected at least "
            "one P2POp, and nothing else"
        )
    if len({id(op.group) for op in ops}) > 1:
        raise ValueError(
            "batch_isend_irecv: the ops are on different groups; expected one group"
        )
    with coalescing_manager(ops[0].group, async_ops=True):
        works = [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]
    # This rank is in the group: P2POp has refused every other one.
    return cast("list[Work]", works)


def all_reduce_coalesced(
    tensors: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce each of `tensors` over all ranks, in one call of the backend.

    The semantics are those of ``torch.distributed.all_reduce_coalesced``.

    Parameters
    ----------
    tensors : sequence of arrays
        Read and written in place, as by `all_reduce`; on one device. Dtypes may
        differ. Every rank has the same sizes and dtypes, in the same order.
    op, group, async_op : ReduceOp, ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`.

    Examples
    --------
    >>> x, y = np.ones(2), np.ones(3, np.int64)
    >>> dist.all_reduce_coalesced([x, y])
    >>> x, y
    (array([1., 1.]), array([1, 1, 1]))
    """
    return _coalesced(
        "all_reduce_coalesced",
        group,
        async_op,
        {"tensors": tensors},
        lambda tensor: all_reduce(tensor, op, group, async_op=True),
    )


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Array],
    input_tensors: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather each input into the output beside it, in one call of the backend.

    ``torch.distributed.all_gather_into_tensor`` in a ``_coalescing_manager``.

    Parameters
    ----------
    output_tensors, input_tensors : sequences of arrays
        Pairs, as for `all_gather_into_tensor`; all on one device. Every rank has the
        same sizes and dtypes, in the same order.
    group, async_op : ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_into_tensor`.

    Examples
    --------
    >>> whole = np.zeros(2 * dist.get_world_size())
    >>> dist.all_gather_into_tensor_coalesced([whole], [np.ones(2)])
    >>> whole
    array([1., 1.])
    """
    return _coalesced(
        "all_gather_into_tensor_coalesced",
        group,
        async_op,
        {"output_tensors": output_tensors, "input_tensors": input_tensors},
        lambda output, tensor: all_gather_into_tensor(output, tensor, group, True),
    )


def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[Array],
    input_tensors: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce and scatter each input into the output beside it, in one call.

    ``torch.distributed.reduce_scatter_tensor`` in a ``_coalescing_manager``.

    Parameters
    ----------
    output_tensors, input_tensors : sequences of arrays
        Pairs, as for `reduce_scatter_tensor`; all on one device. Every rank has the
        same sizes and dtypes, in the same order.
    op, group, async_op : ReduceOp, ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `reduce_scatter_tensor`.

    Examples
    --------
    >>> part = np.zeros(2)
    >>> whole = np.ones(2 * dist.get_world_size())
    >>> dist.reduce_scatter_tensor_coalesced([part], [whole])
    >>> part
    array([1., 1.])
    """
    return _coalesced(
        "reduce_scatter_tensor_coalesced",
        group,
        async_op,
        {"output_tensors": output_tensors, "input_tensors": input_tensors},
        lambda output, tensor: reduce_scatter_tensor(output, tensor, op, group, True),
    )


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Array]],
    input_tensor_list: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather several arrays of every rank, as one batch.

    The semantics are those of ``torch.distributed.all_gather_coalesced``.

    Parameters
    ----------
    output_tensor_lists : sequence of sequences of arrays
        Written. ``output_tensor_lists[r][i]`` becomes ``input_tensor_list[i]`` of rank
        r: a list for each rank, with as many arrays as `input_tensor_list`.
    input_tensor_list : sequence of arrays
        Read; as many on every rank.
    group, async_op : ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather`; also if a list of outputs has not one array for each
        input.

    Examples
    --------
    >>> out = [[np.zeros(2), np.zeros(1)]]
    >>> dist.all_gather_coalesced(out, [np.ones(2), np.array([5.0])])
    >>> out
    [[array([1., 1.]), array([5.])]]
    """
    pg = member_group(group, "all_gather_coalesced")
    if pg is None:
        return None
    where = Place("all_gather_coalesced", pg)
    check_list(output_tensor_lists, "output_tensor_lists", pg.size(), where)
    lists = {"input_tensor_list": input_tensor_list}
    for rank, outputs in enumerate(output_tensor_lists):
        lists[f"output_tensor_lists[{rank}]"] = outputs
    return _coalesced(
        where.name,
        pg,
        async_op,
        lists,
        lambda tensor, *outputs: all_gather(outputs, tensor, pg, async_op=True),
    )


def _coalesced(
    name: str,
    group: Group,
    async_op: bool,
    lists: Mapping[str, Sequence[Array]],
    start: Callable[..., Work | None],
) -> Work | None:
    """Do the function `name`: `start` with one array of each of `lists`, as a batch."""
    pg = member_group(group, name)
    if pg is None:
        return None
    where = Place(name, pg)
    listed = {
        argument: as_list(arrays, f"{where}: {argument}", "a list of arrays")
        for argument, arrays in lists.items()
    }
    first, *others = listed
    for other in others:
        if len(listed[other]) != len(listed[first]):
            raise ValueError(
                f"{where}: {other} has {len(listed[other])} entries, {first} "
                f"{len(listed[first])}; expected as many"
            )
    with coalescing_manager(pg, async_ops=True) as manager:
        for arrays in zip(*listed.values(), strict=True):
            start(*arrays)
    if pg.capturing and not async_op:  # the block around it waits
        return None
    return manager.work.finish(async_op)


# torch's newer names, and the one by which its programs coalesce.
all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
_coalescing_manager = coalescing_manager
