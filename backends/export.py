"""This rank's flight recorder as data for other processes, and as a file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .fr_format import flight_recorder
from .recorder import recorder
from .world import world

__all__ = ["dump_flight_recorder", "ring", "save_flight_recorder"]

# The base name of PyTorch's dumps where TORCH_FR_DUMP_TEMP_FILE does not say more.
_FILE = "comm_lib_trace_rank_"


def dump_flight_recorder(
    path: str | os.PathLike[str], *, point_to_point: bool = True
) -> Path:
    """Write this rank's flight recorder for PyTorch's analyser; return the file.

    `path` is a folder (there already, or ending in a slash), or a prefix, to
    which the rank is appended, as with PyTorch's ``TORCH_FR_DUMP_TEMP_FILE``.
    Missing folders are made. The file is written as a whole or not at all, and
    at any time: also while this rank hangs, from another thread. When all
    ranks have written theirs into one folder, and nothing else is there,
    ``torchfrtrace FOLDER`` of PyTorch 2.13 reads them and says what did not
    match. `rankscope.backends.fr_format` tells how ops are named there.

    What that analyser does not understand, in PyTorch's own dumps neither:

    - Sends and receives, but for single ones in a group of two. Any others it
      calls a mismatch, and at a batch of them it ends with a `NameError` where
      tabulate is not installed; ``point_to_point=False`` leaves all of them out.
    - Different ops in one coalesced batch, unless it finds the files in order.
    - The records of generations that a restarted rank was not in, which are
      there too: a mismatch each. After ten mismatches in a group it gives up;
      ``--mismatch_cap`` sets that number.

    Raises `ValueError` if this process has no rank yet, or if a prefix ends
    with a digit, and `OSError` if the file cannot be written.
    """
    mine = ring()
    if not point_to_point:
        mine["records"] = [one for one in mine["records"] if not one["is_p2p"]]
    return save_flight_recorder(flight_recorder(**mine), path, mine["rank"])


def ring(last: int | None = None) -> dict[str, Any]:
    """This rank's records, and what reading them takes, as plain data (JSON-able).

    With `last` only so many of them, the newest.

    The arguments of :func:`flight_recorder`: ``rank``, ``groups`` (name → the
    global ranks in it) and ``records`` (`Record.as_dict`, oldest first). May be
    called from any thread while the main thread is blocked. Raises `ValueError`
    if this process has no rank yet.
    """
    records = recorder.records()
    if last is not None:
        records = records[max(0, len(records) - last) :]
    groups = {record.group: record.status.ranks for record in records}
    groups.update({group.name: group.ranks for group in world.groups()})
    rank = world.rank
    if rank is None and records:  # the groups were destroyed since
        rank = records[-1].status.rank
    if rank is None:
        raise ValueError(
            "the flight recorder of this process is empty and it has no rank yet: "
            "call init_process_group() first"
        )
    return {
        "rank": rank,
        "groups": {name: list(ranks) for name, ranks in groups.items()},
        "records": [record.as_dict() for record in records],
    }


def save_flight_recorder(
    dump: Mapping[str, Any], path: str | os.PathLike[str], rank: int
) -> Path:
    """Write what :func:`flight_recorder` made of `rank`; see `dump_flight_recorder`."""
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
    # Not a name that an analyser at work in this folder would take for a dump.
    unfinished = file.parent / f".{os.getpid()}-{rank}.unfinished"
    try:
        # The protocol of PyTorch's pickles.
        unfinished.write_bytes(pickle.dumps(dict(dump), protocol=2))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file
