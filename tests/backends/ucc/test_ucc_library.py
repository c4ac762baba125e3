"""UCC's library: found, loaded, and as its header says."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from rankscope.backends.errors import DistBackendError
from rankscope.backends.ucc import library, ucc
from tests.backends.ucc_build import BUILD


def _include(found: Path) -> Path:
    """The folder of the headers: beside the library, or that of the build for tests."""
    for folder in (found.parent.parent / "include", BUILD / "include"):
        if (folder / "ucc/api/ucc.h").exists():
            return folder
    pytest.skip("this UCC comes without its header")


def _facts() -> dict[str, int]:
    """What `ucc` says of sizes, offsets and constants, by a C expression for each."""
    facts = {name: value for name, value in ucc.CONSTANTS.items()}
    facts["sizeof(ucc_status_t)"] = ctypes.sizeof(ctypes.c_int)
    facts["offsetof(ucc_coll_req_t, status)"] = 0
    for name, struct in ucc.STRUCTS.items():
        facts[f"sizeof({name})"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            if field == "kind":  # the union of ucc_ep_map_t, which has no name
                continue
            offset, size = getattr(struct, field).offset, getattr(struct, field).size
            facts[f"offsetof({name}, {field})"] = offset
            facts[f"sizeof((({name} *)0)->{field})"] = size
    return facts


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_structs_and_constants_are_those_of_the_header(
    ucc_library: Path, tmp_path: Path
) -> None:
    facts = _facts()
    lines = "\n".join(f'    printf("%lld\\n", (long long)({fact}));' for fact in facts)
    source = tmp_path / "facts.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <ucc/api/ucc.h>\n"
        f"int main(void) {{\n{lines}\n    return 0;\n}}\n"
    )
    program = tmp_path / "facts"
    # The header has functions of the library inline, which nothing here calls.
    command = ["cc", "-O1", "-isystem", str(_include(ucc_library)), str(source)]
    undefined = "-Wl,--unresolved-symbols=ignore-all"
    subprocess.run([*command, undefined, "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    values = map(int, output.stdout.split())
    assert dict(zip(facts, values, strict=True)) == facts


def test_the_library_is_loaded_over_ucx(ucc_library: Path) -> None:
    ours = library.load()
    assert ours is library.load()
    assert ours.path == ucc_library
    assert ours.version.startswith("1.")
    with pytest.raises(library.UCCError, match="a call failed: .*Invalid") as caught:
        ours.check("a call", -3)
    assert caught.value.status == -3


@pytest.mark.parametrize("searched", ["LD_LIBRARY_PATH", "HPCX_UCC_DIR"])
def test_it_is_found_where_its_packages_put_it(
    searched: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libucc.so.1").touch()
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.delenv("HPCX_UCC_DIR", raising=False)
    in_path = searched == "LD_LIBRARY_PATH"
    monkeypatch.setenv(searched, str(folder if in_path else tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "nothing"))
    assert library.find() == folder / "libucc.so.1"
    assert library.unavailable_reason() is None


def test_where_there_is_none_the_reason_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_folders", lambda: iter([tmp_path]))
    reason = library.unavailable_reason()
    assert reason is not None
    for word in ("HPC-X", "conda-forge", library.VARIABLE):
        assert word in reason
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "libucc.so.9"))
    assert "there is no such file" in str(library.unavailable_reason())


def test_what_is_no_library_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libucc.so.1").write_text("no library")
    monkeypatch.setenv(library.VARIABLE, str(tmp_path))
    monkeypatch.setattr(library, "_loaded", None)
    with pytest.raises(DistBackendError, match=r"cannot be used: UCC in .* not load"):
        library.load()
