"""The files of one job in other places: none of these changes what they tell."""

from __future__ import annotations

import random
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["in_other_places"]


def in_other_places(
    files: Iterable[Path], into: Path, seed: int | str
) -> tuple[Path, Path, Path]:
    """Return a tree, a tar and a zip in `into` with `files`, in another order."""
    found = sorted(files)
    random.Random(seed).shuffle(found)
    tree, tarball, pack = into / "apart", into / "all.tar.gz", into / "all.zip"
    with tarfile.open(tarball, "w:gz") as tar, zipfile.ZipFile(pack, "w") as zipped:
        for number, file in enumerate(found):
            apart = tree / f"{999 - number:03}" / file.name
            apart.parent.mkdir(parents=True)
            shutil.copy(file, apart)
            tar.add(file, f"{number % 3}/{file.name}")
            zipped.write(file, f"{number:03}/{file.name}")
    return tree, tarball, pack
