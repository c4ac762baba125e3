"""Op hooks: user code at the dispatch point, before an op and after it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import NoneType

from .flight_recorder import Record, recorder
from .work import Work

__all__ = ["OpHook", "add_op_hook"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()

Pre = Callable[[Record], None]
Post = Callable[[Record, Work], None]


class OpHook:
    """A hook that `add_op_hook` installed; :meth:`remove` uninstalls it."""

    def __init__(self, pre: Pre | None, post: Post | None, group: str | None) -> None:
        self._pre = pre
        self._post = post
        self._group = group

    def before(self, record: Record) -> None:
        """Run `pre`; an error that it raises prevents the op."""
        if self._pre is not None and self._group in (None, record.group):
            self._pre(record)

    def watch(self, record: Record, work: Work) -> None:
        """Run `post` when `work` has ended."""
        if self._post is not None and self._group in (None, record.group):
            work._when_over(lambda done: self._after(record, done))

    def _after(self, record: Record, work: Work) -> None:
        assert self._post is not None
        try:
            self._post(record, work)
        except Exception:  # noqa: BLE001 - hooks are user code
            # The op has ended, on a thread without a caller to raise to.
            _log.exception("the post hook failed after %s", record.describe())

    def remove(self) -> None:
        """Uninstall the hook; ops issued from now on do not call it."""
        with _lock:
            recorder.hooks = tuple(one for one in recorder.hooks if one is not self)


def add_op_hook(
    pre: Pre | None = None, post: Post | None = None, group: str | None = None
) -> OpHook:
    """Call ``pre(record)`` before each op is issued, ``post(record, work)`` after it.

    Parameters
    ----------
    pre : callable, optional
        Runs on the caller's thread, and may delay the op, or veto it by raising: then
        nothing is issued here, and the other ranks wait, so veto on all ranks alike.
    post : callable, optional
        Runs once the Work is over, on whatever thread ended it.
    group : str, optional
        The name of the only group whose ops the hook gets; ``None``: all groups.

    Returns
    -------
    OpHook
        The hook; its ``remove()`` uninstalls it.

    Raises
    ------
    ValueError
        Neither `pre` nor `post` is given.
    TypeError
        `pre` or `post` cannot be called, or `group` is no name.

    Notes
    -----
    `record` is the op's entry of the Flight Recorder, with `group`, `op_type`, `sizes`,
    `dtypes`, `reduce_op`, `peer` and `timeout`, and in `post` with `state`,
    `started_ns`, `ended_ns` and `error`; ``record.as_dict()`` has all of it, with the
    source line. Before the op it has no sequence number yet. As hooks of
    ``torch.distributed.ProcessGroup``.

    Examples
    --------
    >>> seen = []
    >>> hook = dist.add_op_hook(pre=lambda record: seen.append(record.op_type.value))
    >>> dist.all_reduce(np.ones(2))
    >>> hook.remove()
    >>> seen
    ['all_reduce']
    """
    if pre is None and post is None:
        raise ValueError("add_op_hook: give pre, post or both")
    for name, one in (("pre", pre), ("post", post)):
        if one is not None and not callable(one):
            raise TypeError(f"add_op_hook: {name}={one!r}; expected a callable")
    if not isinstance(group, (str, NoneType)):
        raise TypeError(f"add_op_hook: group={group!r}; expected the name of a group")
    hook = OpHook(pre, post, group)
    with _lock:
        recorder.hooks = (*recorder.hooks, hook)
    return hook
