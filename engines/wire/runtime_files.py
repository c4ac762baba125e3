"""Files in Jupyter's runtime folder that say what of this user runs, and where."""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from jupyter_core.paths import jupyter_runtime_dir, secure_write

__all__ = ["RuntimeFile", "runtime_path"]

T = TypeVar("T", bound="RuntimeFile")


def runtime_path(name: str) -> Path:
    return Path(jupyter_runtime_dir()) / name


@dataclass(frozen=True)
class RuntimeFile(ABC):
    """What one file says: the fields of a subclass, which is a dataclass as well."""

    #: The names of the files begin with it.
    PREFIX: ClassVar[str]

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file."""

    def write(self) -> None:
        """Write the file, mode 0600, so that nobody finds a part; or `OSError`."""
        path = self.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with secure_write(str(unfinished)) as file:
            json.dump(asdict(self), file)
        unfinished.replace(path)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    @classmethod
    def load(cls: type[T], path: Path) -> T | None:
        """Return what the file says; ``None``: not there, or of another version."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def load_all(cls: type[T]) -> list[T]:
        found = []
        for path in runtime_path("").glob(f"{cls.PREFIX}*.json"):
            one = cls.load(path)
            if one is not None:
                # It may be deleted meanwhile.
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime, one))
        return [one for _, one in sorted(found, key=lambda pair: -pair[0])]
