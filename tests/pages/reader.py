"""Does what a page says, from its first block to its last, and compares what it shows.

Cells go to a notebook kernel with real ranks, commands to a shell beside it, files and
commands into one empty folder. ``make`` only prints what it would do. On a page that
uses ``pip``, it installs from the folder, without a network, into an environment there.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.magics.kernels import TIMEOUT, Cell, Kernel, running_kernel
from tests.pages.blocks import NEEDS_TORCH, ROOT, Block, blocks_of, matches

__all__ = ["Reader", "read"]

#: Seconds within which a command shows what the page says of a cell that hangs.
PATIENCE = 30.0

_SHELL = f"""\
set -euo pipefail
make() {{ command make --dry-run --directory '{ROOT}' "$@" > make.log; }}
pip() {{ python -m pip "$@"; }}
rankscope() {{ python -m rankscope "$@"; }}
"""

# One that sees what is installed where the tests run.
_ENVIRONMENT = "import site; site.addsitedir({packages!r})\n"


def read(page: str, folder: Path, run_elsewhere: Container[str] = ()) -> None:
    """Do what the page says; the blocks of `run_elsewhere` are those of other tests."""
    blocks = [block for block in blocks_of(page) if block.code not in run_elsewhere]
    with Reader.of(blocks, folder) as reader:
        reader.read()


class Reader:
    """One who reads a page with a notebook and a terminal open."""

    def __init__(self, blocks: list[Block], folder: Path, stack: ExitStack) -> None:
        self.blocks = blocks
        self.folder = folder
        self._stack = stack
        self._kernel: Kernel | None = None
        self._hanging: tuple[Block, str] | None = None
        self._ports: dict[str, str] = {}
        self._environment = _variables(folder, own="pip install" in _to_run(blocks))

    @classmethod
    @contextmanager
    def of(cls, blocks: list[Block], folder: Path) -> Iterator[Reader]:
        """A reader whose kernel and ranks end with the block."""
        with ExitStack() as stack:
            yield cls(blocks, folder, stack)

    def read(self) -> None:
        """Run all blocks in order."""
        for block in self.blocks:
            needs_more = block.note == NEEDS_TORCH and find_spec("torch") is None
            if block.not_run or needs_more:
                continue
            if block.kind == "file":
                self._write(block)
            elif block.kind == "program":
                self._run_program(block)
            elif block.kind == "commands":
                self._run_commands(block)
            elif block.kind == "cell":
                self._run_cell(block)
            elif block.kind == "quoted":
                self._find(block)
            elif block.note == "the cell ends":
                self._end_hanging(block)
        self._end_hanging()
        if self._kernel is not None:
            self._kernel("%dist_shutdown")

    def _output_of(self, block: Block) -> Block | None:
        """Return the block that shows what `block` prints, if the page has one."""
        index = self.blocks.index(block) + 1
        below = self.blocks[index] if index < len(self.blocks) else None
        if below is None or below.kind != "output" or below.note == "the cell ends":
            return None
        return below

    def _compare(
        self, block: Block, output: str, expected: Block | None = None
    ) -> None:
        expected = expected or self._output_of(block)
        assert expected is None or _shows(expected, output), (
            f"{block} does not print what {expected} says, but:\n{output}"
        )

    # -- files, programs and commands

    def _find(self, block: Block) -> None:
        """Find the lines of the block in their file, where they may be indented."""
        name = block.note.split()[1]
        text = _unindented((ROOT / name).read_text(encoding="utf-8"))
        for part in re.split(r"^ *\.\.\.\n", block.code, flags=re.MULTILINE):
            assert _unindented(part) in text, f"{block}: {name} does not have\n{part}"

    def _write(self, block: Block) -> None:
        later = self.blocks[self.blocks.index(block) + 1 :]
        first = Path(block.file).parts[0]
        names = {block.file, first, Path(first).stem}
        assert any(
            re.search(rf"\b{re.escape(name)}\b", other.code)
            for other in later
            for name in names
            if other.kind in ("commands", "cell")
        ), f"{block}: nothing on the page uses {block.file}"
        path = self.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")

    def _run_program(self, block: Block) -> None:
        """Run it as a script of one rank, or the last lines of another."""
        code = block.code
        if block.note.startswith("continues "):
            begun = (self.folder / block.note.split()[1]).read_text(encoding="utf-8")
            first, end, rest = begun.rpartition("dist.destroy_process_group()")
            code = f"{first}{block.code}{end}{rest}"
        path = self.folder / f"block_at_line_{block.line}.py"
        path.write_text(code, encoding="utf-8")
        status, output = self._shell(f"RANK=0 WORLD_SIZE=1 python {path.name}")
        assert status == 0, f"{block}:\n{output}"
        self._compare(block, output)

    def _run_commands(self, block: Block) -> None:
        if block.language == "console":
            typed = re.split(r"^\$ ", block.code, flags=re.MULTILINE)
            assert typed.pop(0) == "", f"{block}: it begins with no command"
            for part in typed:
                command, _, expected = part.partition("\n")
                self._run_command(block, command, expected.rstrip())
        else:
            shown = self._output_of(block)
            self._run_command(block, block.code, shown.code if shown else "", shown)

    def _run_command(
        self, block: Block, command: str, expected: str, shown: Block | None = None
    ) -> None:
        in_any_order = shown is not None and shown.note == "in any order"
        # What a command tells of a cell that hangs is there once all ranks have come
        # to where they hang; its status then says that they do.
        deadline = time.monotonic() + (PATIENCE if self._hanging else 0)
        while True:
            status, output = self._shell(command)
            found = matches(expected, output, in_any_order=in_any_order)
            if found and (status == 0 or (self._hanging and expected)):
                return
            if time.monotonic() >= deadline:
                raise AssertionError(f"{block}: `{command}` → {status}\n{output}")

    def _shell(self, command: str) -> tuple[int, str]:
        """Return exit status and output of a command."""
        process = subprocess.Popen(
            ["bash", "-c", _SHELL + self._with_free_ports(command)],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"no end of `{command}`:\n{output}") from None
        return process.returncode, output

    def _with_free_ports(self, command: str) -> str:
        """Return the command with free ports in the place of those of the page."""

        def free(port: re.Match[str]) -> str:
            return self._ports.setdefault(port[0], str(_free_port()))

        return re.sub(r"\b29\d\d\d\b", free, command)

    # -- cells

    def _run_cell(self, block: Block) -> None:
        self._end_hanging()
        lines = block.code.splitlines()
        kernel = self._open_notebook()
        if block.note == "hangs":
            self._hanging = (block, kernel.begin(*lines))
        else:
            self._check_cell(block, kernel(*lines))

    def _end_hanging(self, shown: Block | None = None) -> None:
        """Wait for the end of the cell that hung: the page has said how to end it."""
        if self._hanging is not None:
            block, request = self._hanging
            self._hanging = None
            cell = self._open_notebook().end(request)
            assert cell.status == "error", f"{block} was to hang, and did not"
            self._check_cell(block, cell, shown)

    def _open_notebook(self) -> Kernel:
        if self._kernel is None:
            kernel = self._kernel = self._stack.enter_context(
                running_kernel(folder=self.folder, **self._environment)
            )
            own = any("%dist_init" in b.code for b in self.blocks if b.kind == "cell")
            if not own:  # a page for one who has ranks already
                kernel("%dist_init -n 4")
        return self._kernel

    def _check_cell(
        self, block: Block, cell: Cell, shown_later: Block | None = None
    ) -> None:
        shown = [data.get("text/plain", "") for data in cell.data]
        results = [
            content["data"].get("text/plain", "")
            for _, kind, content in cell.messages
            if kind == "execute_result"
        ]
        streams = [cell.stream(), cell.stream("stderr")]
        output = "\n".join([*streams, *shown, *results, *cell.error_lines])
        if cell.status != "ok" and block.note != "hangs":
            # An error is there because the page shows it.
            expected = self._output_of(block)
            assert expected is not None, f"{block}:\n{output}"
            assert cell.error.partition(":")[0] in expected.code, f"{block}:\n{output}"
        self._compare(block, output, shown_later)


def _unindented(code: str) -> str:
    return "\n".join(line.strip() for line in code.strip().splitlines())


def _shows(expected: Block, output: str) -> bool:
    return matches(expected.code, output, in_any_order=expected.note == "in any order")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _to_run(blocks: list[Block]) -> str:
    return "".join(b.code for b in blocks if b.kind == "commands" and not b.not_run)


def _variables(folder: Path, *, own: bool) -> dict[str, str]:
    """Return the variables of shell and kernel; with `own`, of a new environment."""
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "RANKSCOPE_KEY": "of the test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "COLUMNS": "200",
        # Else print() writes a line and its end apart: those of two ranks mix.
        "PYTHONUNBUFFERED": "",
    }
    if not own:
        return variables
    home = folder / ".environment"
    command = [sys.executable, "-m", "venv", "--without-pip", str(home)]
    subprocess.run(command, check=True, timeout=TIMEOUT)
    (packages,) = home.glob("lib/python*/site-packages")
    installed = _ENVIRONMENT.format(packages=sysconfig.get_path("purelib"))
    (packages / "installed.pth").write_text(installed, encoding="utf-8")
    return variables | {
        "PATH": f"{home / 'bin'}{os.pathsep}{variables['PATH']}",
        # The kernel, whose Python is the one of the tests, finds what pip installs.
        "PYTHONPATH": str(packages),
        "PIP_NO_BUILD_ISOLATION": "0",  # what pip reads as: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
