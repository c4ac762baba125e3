"""One Flight Recorder dump of torch, checked: every value has its type from here on."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

from .evidence_file import RawFile, UnreadableError, only
from .flight_entry import Entry, read_entries

__all__ = ["Dump", "is_cut_off", "looks_like_dump", "ranks_in", "read_dump"]

#: Entries of one dump that are read; torch's ring holds 2,000, unless set otherwise.
MOST = 2_000_000
#: The largest world.
MOST_RANKS = 1_000_000

_NUMBER = re.compile(r"\d+")
_INTEGER = re.compile(r"-?\d{1,20}")
_RANK = re.compile(r"rank[_\-.=]?(\d+)", re.IGNORECASE)
#: The end of a pickled dict: its last items, the number that torch gives it, a stop.
_END = re.compile(rb"[us](?:q.|r.{4})?\.\s*\Z", re.DOTALL)


@dataclass
class Dump:
    """The content of one file."""

    path: str
    version: str = ""
    #: The name of each process group → its description and its global ranks.
    config: dict[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    #: The id of each process group → what torch counts of it: enqueued, started,
    #: completed, -1 for none.
    status: dict[int, tuple[int | None, int | None, int | None]] = field(
        default_factory=dict
    )
    entries: list[Entry] = field(default_factory=list)
    #: The ranks that its name may mean, the likeliest first.
    named: tuple[int, ...] = ()
    modified_ns: int | None = None
    #: Where it was written, if it tells.
    host: str = ""
    #: Its end is not there, and with it the newest entries.
    is_cut_off: bool = False


def looks_like_dump(data: bytes) -> bool:
    """Return whether a file may be a dump, by its first bytes."""
    head = data[:4096].lstrip()
    if data[:1] == b"\x80" or head[:4] == b"(dp0":
        return True
    return head[:1] == b"{" and (b'"entries"' in data or b'"pg_config"' in head)


def is_cut_off(data: bytes) -> bool:
    """Return whether the end of a dump is not there: its rank died while it wrote."""
    if data.lstrip()[:1] == b"{":
        return not data.rstrip().endswith(b"}")
    return _END.search(data, max(0, len(data) - 16)) is None


def read_dump(file: RawFile) -> Dump:
    """Return the dump in `file`; raises `UnreadableError`.

    One that is cut off is taken if its counters are there: torch writes them first.
    """
    try:
        content, is_cut = _load(file.data), False
    except UnreadableError:
        content, is_cut = _before_cut(file.data), True
        if "pg_status" not in content:
            raise
    if not isinstance(content, dict):
        raise UnreadableError(f"no dump: a {type(content).__name__}, not a dict")
    if not {"entries", "pg_config", "pg_status"} & set(content):
        raise UnreadableError("no dump: it has neither entries nor process groups")
    entries = content.get("entries", [])
    if not isinstance(entries, list) or len(entries) > MOST:
        raise UnreadableError("no dump: its entries are not a list of a usable length")
    return Dump(
        file.path,
        only(str, content.get("version")) or "",
        _config(content.get("pg_config") or {}),
        _status(content.get("pg_status") or {}),
        read_entries(entries),
        ranks_in(file.name),
        file.modified_ns,
        (only(str, content.get("host")) or "")[:100],
        is_cut,
    )


def _load(data: bytes) -> Any:
    if not data:
        raise UnreadableError("empty")
    if data.lstrip()[:1] == b"{":
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"damaged: {error}") from error
    return _load_plain(data)


def ranks_in(name: str) -> tuple[int, ...]:
    """Return the numbers of a name, the likeliest rank first.

    ``(2, 0)`` for ``nccl_trace_rank_node00_2``, ``(3, 12)`` for ``rank3_12``.
    """
    marked = [int(one) for one in _RANK.findall(name)]
    others = [int(one) for one in _NUMBER.findall(name)[::-1] if len(one) < 8]
    return tuple(dict.fromkeys([*marked, *others]))


def _config(config: Any) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    if not isinstance(config, dict):
        raise UnreadableError("damaged: pg_config is not a dict")
    found = {}
    for name, one in config.items():
        if not isinstance(one, dict) or type(name) is not str:
            raise UnreadableError("damaged: pg_config is not a dict of dicts by name")
        found[name] = (only(str, one.get("desc")) or "", _rank_list(one.get("ranks")))
    return found


def _rank_list(ranks: Any) -> tuple[int, ...] | None:
    """Return the ranks of ``"[0, 1]"`` or of ``[0, 1]``."""
    if type(ranks) is str:
        return _ranks_in_text(ranks)
    if not isinstance(ranks, (list, tuple)) or not ranks:
        return None
    if len(ranks) > MOST_RANKS or not all(
        isinstance(one, int) and 0 <= one < MOST_RANKS for one in ranks
    ):
        raise UnreadableError("damaged: pg_config holds impossible ranks")
    return tuple(ranks)


# All ranks name the same groups.
@lru_cache(maxsize=1000)
def _ranks_in_text(text: str) -> tuple[int, ...] | None:
    if not re.fullmatch(r"[\[\]\d\s,]*", text):
        raise UnreadableError("damaged: pg_config holds ranks that are no numbers")
    return _rank_list([*map(int, _NUMBER.findall(text))])


def _status(status: Any) -> dict[int, tuple[int | None, int | None, int | None]]:
    if not isinstance(status, dict):
        raise UnreadableError("damaged: pg_status is not a dict")
    found = {}
    for key, one in status.items():
        number = _number(key)
        if not isinstance(one, dict) or number is None:
            raise UnreadableError("damaged: pg_status is not a dict of dicts by number")
        found[number] = (
            _count(one, "last_enqueued_collective"),
            _count(one, "last_started_collective"),
            _count(one, "last_completed_collective"),
        )
    return found


def _count(one: Mapping[str, Any], key: str) -> int | None:
    return _number(one.get(key))


def _number(value: Any) -> int | None:
    """Return a number, which torch's JSON and keys have as text."""
    if type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    return only(int, value)


class _Refusing:
    """Looks up no class, so that nothing of a file is run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"
        raise UnreadableError(f"refused: it asks for {what!r}, a dump holds plain data")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UnreadableError("refused: it refers to objects outside of the file")


class _Plain(_Refusing, pickle.Unpickler):
    pass


# That in C does not tell what it has read so far.
class _PlainInPython(_Refusing, pickle._Unpickler):
    #: What was being filled when the file ended, the outermost first.
    metastack: list[list[Any]]
    #: What has come of the innermost.
    stack: list[Any]


class _Whole(io.BytesIO):
    """Ends where not all is there that is asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if len(found) < (size or 0):
            raise EOFError
        return found


def _before_cut(data: bytes) -> dict[str, Any]:
    """Return what a pickled dump that is cut off tells before; empty: nothing."""
    if not is_cut_off(data) or data[:1] != b"\x80":
        return {}
    reader = _PlainInPython(_Whole(data))
    try:
        reader.load()
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 - it is damaged elsewhere, too: nothing is known
        return {}
    # The dict itself; its keys, each with its value; what is in the list of entries.
    levels: list[list[Any]] = [*reader.metastack, reader.stack, [], []]
    content = dict(zip(levels[1][::2], levels[1][1::2], strict=False))
    if isinstance(content.get("entries"), list):
        # The last one is not whole.
        content["entries"] += levels[2][:-1]
    return content


def _load_plain(data: bytes) -> Any:
    """Return the dicts, lists, tuples, numbers and texts that a pickle holds.

    Raises `UnreadableError` for whatever else it holds, and where it is damaged.
    """
    try:
        # A BytesIO alone cannot look ahead: it is asked for each opcode by itself.
        return _Plain(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except UnreadableError:
        raise
    except MemoryError:
        raise UnreadableError(
            "damaged: it asks for more memory than there is"
        ) from None
    # A damaged pickle raises nearly anything: of its opcodes, its memo, its texts.
    except Exception as error:
        what = str(error) or type(error).__name__
        raise UnreadableError(f"damaged: {what}") from error
