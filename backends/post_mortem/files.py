"""Find files of evidence: in folders, as named, and in archives, which stay packed."""

from __future__ import annotations

import bz2
import gzip
import html
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from .evidence_file import EvidenceFile, RawFile
from .log import extract

__all__ = ["LARGEST", "answers_on", "find_files"]

#: Bytes of a file, and of all members of an archive together, that are read.
LARGEST = 512 << 20
#: Bytes of a log above which only the lines that may tell something are kept.
LARGEST_READ = 64 << 20
LARGEST_ARCHIVE = 8 << 30
#: Files that are looked at, and members of one archive.
MOST = 100_000


def find_files(
    paths: Iterable[str | os.PathLike[str]],
) -> Iterator[RawFile | EvidenceFile]:
    """Yield the content of each file, one at a time, in the order of their names.

    A file that cannot be read is an `EvidenceFile` with its problem. Links to folders
    are not followed; devices and pipes are not opened. Members of tar and zip archives,
    and files that gzip, bzip2 or xz has packed, are unpacked in memory. A page of
    torch's debug server is a file for each rank.
    """
    seen: set[str] = set()
    for path in sorted(_walk(paths), key=str):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        if len(seen) > MOST:
            yield _problem(str(path), f"left out: more than {MOST} files")
            return
        for found in _read(path):
            yield from _answers_in(found)


def _walk(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        for folder, _, names in os.walk(path):
            for name in names:
                yield Path(folder, name)


def _read(path: Path) -> Iterator[RawFile | EvidenceFile]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            yield _problem(str(path), "not a regular file")
            return
        with path.open("rb") as file:
            head = file.read(512)
        if head[:4] == b"PK\x03\x04" and zipfile.is_zipfile(path):
            yield from _zip(path)
        elif _may_be_tar(path, head):
            yield from _tar(path)
        elif _is_packed(head):
            with path.open("rb") as file:
                yield _unpacked(str(path), file, head, LARGEST, status.st_mtime_ns)
        elif status.st_size > LARGEST_READ and b"\0" not in head and head[:1] != b"{":
            with path.open("rb") as file:
                yield RawFile(str(path), extract(file, LARGEST), status.st_mtime_ns)
        elif status.st_size > LARGEST:
            yield _problem(str(path), _too_large(status.st_size))
        else:
            yield RawFile(str(path), path.read_bytes(), status.st_mtime_ns)
    except (*_DAMAGED, tarfile.TarError, zipfile.BadZipFile) as error:
        yield _problem(str(path), _unreadable(error))


#: What the readers of packed files raise where one is damaged, or cut.
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


def _unreadable(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return f"cannot be read: {reason or error}"


def _is_gzip(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b"


def _is_bzip2(head: bytes) -> bool:
    return head[:3] == b"BZh"


def _is_packed(head: bytes) -> bool:
    return _is_gzip(head) or _is_bzip2(head) or head[:6] == b"\xfd7zXZ\x00"


def _may_be_tar(path: Path, head: bytes) -> bool:
    ustar = head[257:262] == b"ustar"
    return (ustar or _is_packed(head)) and tarfile.is_tarfile(path)


def _open_packed(file: IO[bytes], head: bytes) -> IO[bytes]:
    if _is_gzip(head):
        return cast(IO[bytes], gzip.open(file))
    return bz2.open(file) if _is_bzip2(head) else lzma.open(file)


def _unpacked(
    name: str, file: IO[bytes], head: bytes, most: int, modified_ns: int | None
) -> RawFile | EvidenceFile:
    """Return what is in a file that gzip, bzip2 or xz has packed; `most` bytes of it.

    Of a large log, the lines that may tell something.
    """
    with _open_packed(file, head) as unpacked:
        data = unpacked.read(min(LARGEST_READ, most) + 1)
        if len(data) <= min(LARGEST_READ, most):
            return RawFile(name, data, modified_ns)
        if b"\0" not in data[:512] and data[:1] != b"{":
            unpacked.seek(0)
            return RawFile(name, extract(unpacked, most), modified_ns)
        data += unpacked.read(most - len(data) + 1)
        if len(data) > most:
            bound = f"more than {most >> 20} MiB, which is what is read of a file"
            return _problem(name, f"left out: {bound}")
        return RawFile(name, data, modified_ns)


def _member(
    name: str, data: bytes, left: int, modified_ns: int | None = None
) -> RawFile | EvidenceFile:
    """Return the content of a member of an archive, which may be packed itself."""
    if not _is_packed(data):
        return RawFile(name, data, modified_ns)
    most = max(0, min(LARGEST, left))
    try:
        return _unpacked(name, io.BytesIO(data), data[:6], most, modified_ns)
    except _DAMAGED as error:
        return _problem(name, _unreadable(error))


def _zip(path: Path) -> Iterator[RawFile | EvidenceFile]:
    left = LARGEST_ARCHIVE
    with zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if not one.is_dir()]
        for member in sorted(members[:MOST], key=lambda one: one.filename):
            name = f"{path}/{member.filename}"
            if member.flag_bits & 1:
                yield _problem(name, "encrypted")
                continue
            if member.file_size > min(LARGEST, left):
                yield _problem(name, _too_large(member.file_size))
                continue
            with archive.open(member) as file:
                # What the archive says of the size may be wrong.
                data = file.read(member.file_size + 1)
            # Times in a zip archive have no time zone.
            found = _member(name, data[: member.file_size], left)
            left -= len(found.data) if isinstance(found, RawFile) else len(data)
            yield found


def _tar(path: Path) -> Iterator[RawFile | EvidenceFile]:
    left, count = LARGEST_ARCHIVE, 0
    # In the archive's own order, so that it is unpacked once.
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            count += 1
            if count > MOST:
                yield _problem(str(path), f"left out: more than {MOST} members")
                return
            name = f"{path}/{member.name}"
            if not member.isreg():
                continue
            if member.size > min(LARGEST, left):
                yield _problem(name, _too_large(member.size))
                if member.size > left:
                    return
                continue
            file = archive.extractfile(member)
            data = b"" if file is None else file.read()
            # Whole seconds, rounded down.
            found = _member(name, data, left, int(member.mtime + 1) * 1_000_000_000)
            left -= len(found.data) if isinstance(found, RawFile) else len(data)
            yield found


def _too_large(size: int) -> str:
    return f"left out: {size >> 20} MiB, more than {LARGEST >> 20} are not read"


def _problem(path: str, problem: str) -> EvidenceFile:
    return EvidenceFile(path, "other", problem=problem)


#: Bytes at the beginning in which the head of a page is looked for.
_BEGINNING = 1 << 16
_RANK = re.compile(rb"<h2>Rank (\d{1,6}): [^<]*</h2>")
_ANSWER = re.compile(rb"<pre[^>]*>(.*?)</pre>", re.DOTALL)


def _answers_in(found: RawFile | EvidenceFile) -> Iterator[RawFile | EvidenceFile]:
    """Yield the answers of the ranks on a page, as files; another file as it is."""
    if isinstance(found, EvidenceFile) or not _RANK.search(found.data[:_BEGINNING]):
        yield found
        return
    for rank, answer in answers_on(found.data).items():
        yield replace(found, path=f"{found.path}/rank_{rank}", data=answer)


def answers_on(page: bytes) -> dict[int, bytes]:
    """Return the answer of each rank on a page of torch's debug server.

    They are dumps (``/fr_trace_json``) or stacks (``/stacks``, ``/pyspy_dump``).
    """
    found = {}
    _, *parts = _RANK.split(page)
    for rank, part in zip(parts[::2], parts[1::2], strict=True):
        answer = _ANSWER.search(part)
        text = html.unescape(answer[1].decode(errors="replace")) if answer else ""
        found[int(rank)] = text.strip().encode()
    return found
