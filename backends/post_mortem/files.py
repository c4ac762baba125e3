"""Find files of evidence: in folders, as named, and in archives, which stay packed."""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .evidence_file import EvidenceFile, RawFile

__all__ = ["LARGEST", "find_files"]

#: Bytes of a file, and of all members of an archive together, that are read.
LARGEST = 512 << 20
LARGEST_ARCHIVE = 8 << 30
#: Files that are looked at, and members of one archive.
MOST = 100_000


def find_files(
    paths: Iterable[str | os.PathLike[str]],
) -> Iterator[RawFile | EvidenceFile]:
    """Yield the content of each file, one at a time, in the order of their names.

    A file that cannot be read is an `EvidenceFile` with its problem. Links to folders
    are not followed; devices and pipes are not opened. Members of tar and zip archives
    are read in memory.
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
        yield from _read(path)


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
        elif status.st_size > LARGEST:
            yield _problem(str(path), _too_large(status.st_size))
        else:
            yield RawFile(str(path), path.read_bytes(), status.st_mtime_ns)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        yield _problem(str(path), f"cannot be read: {reason or error}")


def _may_be_tar(path: Path, head: bytes) -> bool:
    packed = (
        head[:2] == b"\x1f\x8b" or head[:3] == b"BZh" or head[:6] == b"\xfd7zXZ\x00"
    )
    return (head[257:262] == b"ustar" or packed) and tarfile.is_tarfile(path)


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
            left -= len(data)
            # Times in a zip archive have no time zone.
            yield RawFile(name, data[: member.file_size])


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
            left -= len(data)
            # Whole seconds, rounded down.
            yield RawFile(name, data, int(member.mtime + 1) * 1_000_000_000)


def _too_large(size: int) -> str:
    return f"left out: {size >> 20} MiB, more than {LARGEST >> 20} are not read"


def _problem(path: str, problem: str) -> EvidenceFile:
    return EvidenceFile(path, "other", problem=problem)
