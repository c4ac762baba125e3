"""This rank's flight recorder as data for other processes, and as a file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..groups.world import world
from ..work.flight_recorder import Record, recorder
from ..work.record_fields import Course, newest
from .torch_format import flight_recorder

__all__ = ["dump_flight_recorder", "local_dump", "save_flight_recorder"]

# The base name of PyTorch's dumps where TORCH_FR_DUMP_TEMP_FILE is not set.
_FILE = "comm_lib_trace_rank_"


def dump_flight_recorder(
    path: str | os.PathLike[str], *, point_to_point: bool = True
) -> Path:
    """Write this rank's flight recorder for PyTorch's analyser; return the file.

    The file is written as a whole or not at all. The call works at any time, also from
    another thread while this rank hangs. When all ranks have written their files into
    one folder that holds no other file, ``torchfrtrace FOLDER`` of PyTorch 2.13 reads
    the files and reports mismatches.

    Parameters
    ----------
    path : str or path-like
        A folder (an existing one, or a path that ends in a slash), or a prefix, to
        which the rank is appended, as with PyTorch's ``TORCH_FR_DUMP_TEMP_FILE``.
        Missing folders are made.
    point_to_point : bool, default True
        Whether sends and receives are written.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    ValueError
        This process has no rank yet, or a prefix ends with a digit.
    OSError
        The file cannot be written.

    Notes
    -----
    `rankscope.backends.observe.torch_format` documents the names of ops there. The
    analyser has these limits, also with PyTorch's own dumps:

    - Sends and receives are supported only one by one in a group of two. The analyser
      reports any others as mismatches, and ends at a batch of them with a `NameError`
      where tabulate is not installed; ``point_to_point=False`` leaves all of them out.
    - Different ops in one coalesced batch need files that the analyser lists in order.
    - Each record of a generation that a restarted rank was not in counts as a
      mismatch. The analyser stops after ten mismatches in a group;
      ``--mismatch_cap`` sets that number.

    Examples
    --------
    >>> import tempfile
    >>> dist.all_reduce(np.ones(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = dist.dump_flight_recorder(folder)
    ...     size = file.stat().st_size
    >>> size > 0
    True
    """
    mine = local_dump()
    if not point_to_point:
        mine["records"] = [one for one in mine["records"] if not one["is_p2p"]]
    return save_flight_recorder(flight_recorder(**mine), path, mine["rank"])


def local_dump(last: int | None = None) -> dict[str, Any]:
    """Return this rank's records, rank and groups as plain data (JSON-able).

    The records of our own groups come first, then those of the groups that are watched.
    `last` limits both to the newest `last` ones, those in flight, and the newest ones
    of each group.

    The keys are the arguments of :func:`flight_recorder`: ``rank``, ``groups`` (id →
    ``name``, global ``ranks`` and, where this rank has issued no op in it, its
    ``generation`` as ``unused``) and ``records`` (`Record.as_dict`, oldest first).
    Any thread may call this function while the main thread is blocked. Raises
    `ValueError` if this process has no rank yet.
    """
    records = recorder.records()
    watched = [one for source in world.sources for one in source.records()]
    if last is not None:
        records = newest(records, last, Record.course)
        fields = itemgetter("group_id", "generation", "is_p2p", "state")
        watched = newest(watched, last, lambda one: Course(*fields(one)))
    groups: dict[str, dict[str, Any]] = {
        record.status.group_id: {
            "name": record.group,
            "ranks": list(record.status.ranks),
        }
        for record in records
    }
    for one in world.all_groups():
        groups[one.key.id] = {"name": one.key.name, "ranks": list(one.key.ranks)}
        if (generation := one.unused_generation()) is not None:
            groups[one.key.id]["unused"] = generation
    ranks = [world.rank, *(source.rank for source in world.sources)]
    rank = next((one for one in ranks if one is not None), None)
    if rank is None and records:  # the groups have been destroyed
        rank = records[-1].status.rank
    if rank is None:
        raise ValueError(
            "the flight recorder of this process is empty and it has no rank yet: "
            "call init_process_group() first"
        )
    return {
        "rank": rank,
        "groups": groups,
        "records": [*(record.as_dict() for record in records), *watched],
    }


def save_flight_recorder(
    dump: Mapping[str, Any], path: str | os.PathLike[str], rank: int
) -> Path:
    """Write the :func:`flight_recorder` dump of `rank`; see `dump_flight_recorder`."""
    text = os.fspath(path)
    if text.endswith(os.sep) or os.path.isdir(text):
        file = Path(text) / f"{_FILE}{rank}"
    elif text[-1:].isdigit():
        raise ValueError(
            f"path is {text!r}, and the rank, {rank}, is appended to it: expected a "
            f"folder, or a prefix that does not end with a digit, as {text + '_'!r}"
        )
    else:
        file = Path(f"{text}{rank}")
    file.parent.mkdir(parents=True, exist_ok=True)
    # An analyser that reads this folder must not match the temporary name.
    unfinished = file.parent / f".{os.getpid()}-{rank}.unfinished"
    try:
        # The pickle protocol of PyTorch's dumps.
        unfinished.write_bytes(pickle.dumps(dict(dump), protocol=2))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file
