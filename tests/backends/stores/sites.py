"""Stores that are opened several times, here and in other processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from rankscope.backends.stores.base import Store
from rankscope.backends.stores.file import FileStore
from rankscope.backends.stores.hash import HashStore
from rankscope.backends.stores.prefix import PrefixStore
from rankscope.backends.stores.tcp import TCPStore

__all__ = ["CLONE", "CONNECT", "KEY", "Site", "open_site"]

KEY = b"the key of this test"

# How another process reaches the store under test; formatted with `where`.
CONNECT = {
    "file": "FileStore({where!r}, timeout=20)",
    "tcp": f"TCPStore('127.0.0.1', {{where}}, timeout=20, key={KEY!r})",
}
CONNECT |= {
    f"prefix-{kind}": f"PrefixStore('p', {code})" for kind, code in CONNECT.items()
}
# Within one process only.
CLONE = {"hash": "first.clone()", "prefix-hash": "PrefixStore('p', first.clone())"}


class Site:
    """A store that can be opened several times, here and in other processes."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.opened: list[Store] = []
        self.master: TCPStore | None = None
        self.first = HashStore(timeout=20)
        if kind.endswith("tcp"):
            self.master = TCPStore("127.0.0.1", 0, is_master=True, timeout=20, key=KEY)
            self.where: int | str = self.master.port
        else:
            self.where = str(directory / "store")

    @property
    def code(self) -> str:
        return {**CONNECT, **CLONE}[self.kind].format(where=self.where)

    def open(self) -> Store:
        names = {
            "first": self.first,
            "FileStore": FileStore,
            "TCPStore": TCPStore,
            "PrefixStore": PrefixStore,
        }
        store: Store = eval(self.code, names)
        self.opened.append(store)
        return store

    def run(self, body: str) -> subprocess.Popen[str]:
        """Start a process that has `store` and runs `body`; "ready" it prints first."""
        program = (
            "import sys\n"
            "from rankscope.backends.stores.file import FileStore\n"
            "from rankscope.backends.stores.prefix import PrefixStore\n"
            "from rankscope.backends.stores.tcp import TCPStore\n"
            f"store = {self.code}\nprint('ready', flush=True)\n{body}\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def close(self) -> None:
        for store in self.opened:
            store.close()
            if isinstance(store, PrefixStore):
                store.underlying_store.close()
        self.first.close()
        if self.master is not None:
            self.master.close()


def open_site(kind: str, directory: Path) -> Iterator[Site]:
    process = psutil.Process()
    threads, files = threading.active_count(), process.num_fds()
    site = Site(kind, directory)
    yield site
    site.close()
    assert threading.active_count() == threads
    assert process.num_fds() == files
