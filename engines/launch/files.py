"""What a cluster leaves in its profile and in the folder for temporary files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from ..errors import ClusterStartError

__all__ = ["files_of", "folder_error", "remove", "session_folder"]

#: Of a file that cannot be written, whatever it is: its folder is full or read-only.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def folder_error(error: BaseException, profile: str = "") -> ClusterStartError | None:
    """Return the error for a folder that takes no files; ``None`` for other errors."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    file = error.filename2 or error.filename
    folder = os.path.dirname(str(file)) if file else profile
    ours = Path(folder).is_relative_to(tempfile.gettempdir())
    variable = "TMPDIR" if ours and not folder.startswith(profile) else "IPYTHONDIR"
    return ClusterStartError(
        f"{folder} takes no files ({error.strerror}): make room there, or name a "
        f"folder elsewhere by {variable}, in the environment in which Jupyter starts"
    )


def session_folder(cluster_id: str) -> Path:
    """Return mpiexec's session folder: not in the profile, maybe on a network."""
    return Path(tempfile.gettempdir(), f"rankscope-mpi-{os.getuid()}-{cluster_id}")


def files_of(profile: str, cluster_id: str) -> list[str]:
    """Return the files and folders of the cluster; not all may be there."""
    dashed = f"-{cluster_id}" if cluster_id else ""
    security, log = Path(profile, "security"), Path(profile, "log")
    fixed = [
        security / f"cluster-{cluster_id}.json",
        security / f"ipcontroller{dashed}-client.json",
        security / f"ipcontroller{dashed}-engine.json",
        # The hub writes this file, which is never read, and does not remove it.
        log / f"engines{cluster_id}.json",
        session_folder(cluster_id),
    ]
    # The pid of the process that started the controller; when engines were started. The
    # id of another cluster may begin with this one's.
    logs = re.compile(
        rf"ip(controller{re.escape(dashed)}-\d+|engine{re.escape(dashed)}-\d{{9,}}(-\w+)?)"
        r"\.log"
    )
    found = log.iterdir() if log.is_dir() else ()
    written = [path for path in found if logs.fullmatch(path.name)]
    return [str(path) for path in [*fixed, *written]]


def remove(path: str) -> None:
    """Remove a file, or a folder with all that it contains, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
