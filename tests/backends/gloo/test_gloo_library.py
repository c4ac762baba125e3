"""Which gloo library is used, its self-test, and the refusal of one that is unknown."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.errors import DistBackendError
from rankscope.backends.gloo import library, self_test
from rankscope.backends.gloo.backend import GlooBackend
from rankscope.backends.gloo.library import Library, installed, unavailable
from rankscope.backends.gloo.rendezvous import check_libraries
from rankscope.backends.gloo.self_test import SelfTest
from rankscope.backends.install import pip_install

pytestmark = pytest.mark.skipif(not installed(), reason="no gloo library is installed")

each_library = pytest.mark.parametrize("found", installed().values(), ids=str)

SEND = {
    "pygloo": b"_ZN4gloo9transport2uv13UnboundBuffer4sendEimmm\0",
    "xoscar": b"_ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm\0",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, and none of what this process knows already."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(self_test, "_results", {})
    return folder / "rankscope" / "gloo"


def doctored(found: Library, folder: Path, old: bytes, new: bytes) -> Library:
    content = Path(found.path).read_bytes()
    assert old in content
    copy = folder / Path(found.path).name
    copy.write_bytes(content.replace(old, new))
    return Library(found.name, "9.9", str(copy))


def lacking_a_symbol(found: Library, folder: Path) -> Library:
    name = SEND[found.name]
    return doctored(found, folder, name, name.replace(b"4send", b"4sent"))


def truncated(found: Library, folder: Path) -> Library:
    copy = folder / Path(found.path).name
    copy.write_bytes(Path(found.path).read_bytes()[:500_000])
    return Library(found.name, "9.9", str(copy))


# -- the self-test ---------------------------------------------------------


@each_library
def test_the_installed_library_passes_within_2_s(found: Library, cache: Path) -> None:
    result = self_test.self_test(found.name, found.path)
    assert result == SelfTest(True, "", result.seconds)
    assert str(result) == f"passed in {result.seconds:.2g} s"
    assert json.loads(next(cache.glob("*.json")).read_text())["passed"] is True


@each_library
def test_a_library_without_a_symbol_is_refused(found: Library, tmp_path: Path) -> None:
    other = lacking_a_symbol(found, tmp_path)
    result = self_test.self_test(other.name, other.path)
    assert not result.passed
    assert "4send" in result.reason or "4sent" in result.reason


@each_library
def test_a_truncated_library_is_refused(found: Library, tmp_path: Path) -> None:
    other = truncated(found, tmp_path)
    result = self_test.self_test(other.name, other.path)
    assert not result.passed
    assert other.path in result.reason or "SIG" in result.reason


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "no_library.so"
    other.write_bytes(b"text")
    result = self_test.self_test("xoscar", str(other))
    assert not result.passed
    assert "file too short" in result.reason


@pytest.mark.skipif(len(installed()) < 2, reason="one gloo library is installed")
def test_the_other_library_is_refused() -> None:
    result = self_test.self_test("pygloo", installed()["xoscar"].path)
    assert not result.passed
    assert "this pygloo lacks a function" in result.reason


def refused(me: Rank, name: str) -> str:
    """A rank with a library of an unknown build: it gets a sentence, and lives."""
    os.environ["XDG_CACHE_HOME"] = me.folder
    other = lacking_a_symbol(installed()[name], Path(me.folder))
    with pytest.MonkeyPatch.context() as patch, me.store("gloo") as store:
        patch.setattr(library, "installed", lambda: {name: other})
        with pytest.raises(DistBackendError) as caught:
            GlooBackend(store, me.rank, 2)
    return str(caught.value)


@each_library
def test_a_rank_is_told_what_its_library_lacks(found: Library) -> None:
    (said,) = run_ranks(1, refused, found.name)
    install = pip_install("").rstrip()
    verified = f"Rankscope was verified with {found.name} {found.version}: {install}"
    assert f"gloo cannot be used: {found.name} 9.9 (" in said
    assert ") did not pass its self-test: " in said
    assert verified in said


def test_a_result_is_stored_by_the_hash_of_the_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def run(name: str, path: str) -> SelfTest:
        runs.append(path)
        return SelfTest(False, "reason", 0.5)

    monkeypatch.setattr(self_test, "_run", run)
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    for file in (first, second):
        file.write_bytes(b"content")
    results = []
    for file in (first, first, second):
        results.append(self_test.self_test("xoscar", str(file)))
        monkeypatch.setattr(self_test, "_results", {})  # as another process
    assert results == [SelfTest(False, "reason", 0.5)] * 3
    assert runs == [str(first)]
    second.write_bytes(b"other content")
    self_test.self_test("xoscar", str(second))
    assert runs == [str(first), str(second)]
    for stored in cache.glob("*.json"):
        stored.write_text("{")
    monkeypatch.setattr(self_test, "_results", {})
    self_test.self_test("xoscar", str(second))
    assert len(runs) == 3


def one_tests(me: Rank, path: str) -> int:
    os.environ["XDG_CACHE_HOME"] = me.folder
    runs = 0

    def run(name: str, path: str) -> SelfTest:
        nonlocal runs
        runs += 1
        threading.Event().wait(0.3)  # so that the others come meanwhile
        return SelfTest(True, "", 0.3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "_run", run)
        me.meet("here")
        assert self_test.self_test("xoscar", path).passed
    return runs


def test_one_rank_tests_and_the_others_wait() -> None:
    assert sum(run_ranks(3, one_tests, __file__)) == 1


def test_a_home_that_cannot_be_written_tests_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    found = next(iter(installed().values()))
    for _ in range(2):
        monkeypatch.setattr(self_test, "_results", {})
        assert self_test.self_test(found.name, found.path).passed
    assert no_folder.read_bytes() == b""


def test_a_test_without_an_end_is_no_lasting_result(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_LIMITS", (0, 0))
    found = next(iter(installed().values()))
    result = self_test.self_test(found.name, found.path)
    assert not result.passed
    assert result.reason == "no result within 0 s"
    assert not [*cache.glob("*.json")]


# -- the choice ------------------------------------------------------------

BOTH = {
    "pygloo": Library("pygloo", "0.2.1", "/p.so"),
    "xoscar": Library("xoscar", "0.12.2", "/x.so"),
}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: BOTH)


@pytest.mark.usefixtures("both")
def test_an_option_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library._chosen() == BOTH["pygloo"]
    monkeypatch.setenv("RANKSCOPE_GLOO", "xoscar")
    assert library._chosen() == BOTH["xoscar"]
    assert not library.has_options()
    with dist.gloo_options(library="pygloo"):
        assert library.has_options()
        assert library._chosen() == BOTH["pygloo"]
        with dist.gloo_options():
            assert library._chosen() == BOTH["pygloo"]
    assert library._chosen() == BOTH["xoscar"]


@pytest.mark.usefixtures("both")
def test_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="library='xosca'.*did you mean xoscar"):
        dist.gloo_options(library="xosca").__enter__()
    monkeypatch.setenv("RANKSCOPE_GLOO", "xosca")
    assert re.search("RANKSCOPE_GLOO is 'xosca'.*mean xoscar", unavailable() or "")


def test_what_is_not_installed_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "installed", dict)
    assert "neither pygloo nor xoscar" in (unavailable() or "")
    assert "pip install --no-deps xoscar==0.12.2" in (unavailable() or "")
    with pytest.raises(DistBackendError, match="neither"):
        dist.gloo_info()
    monkeypatch.setattr(library, "installed", lambda: {"xoscar": BOTH["xoscar"]})
    assert unavailable() is None
    monkeypatch.setenv("RANKSCOPE_GLOO", "pygloo")
    assert "RANKSCOPE_GLOO names pygloo, which is not installed" in (
        unavailable() or ""
    )


def test_platforms_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "riscv64")
        assert "x86-64 and aarch64 only; this is Linux on riscv64" in (
            unavailable() or ""
        )
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "use gloo on Linux on x86-64 and aarch64 only" in (unavailable() or "")
    with monkeypatch.context() as patch:
        patch.setattr(platform, "python_implementation", lambda: "PyPy")
        assert "this is PyPy" in (unavailable() or "")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_config_var", lambda name: 1)
        assert "free-threaded" in (unavailable() or "")


@each_library
def test_gloo_info_says_what_is_used(
    found: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("RANKSCOPE_GLOO", found.name)
    tested: list[tuple[str, str]] = []

    def run(name: str, path: str) -> SelfTest:
        tested.append((name, path))
        return SelfTest(True, "", 0.25)

    monkeypatch.setattr(self_test, "_run", run)
    info = dist.gloo_info()
    assert tested == [(found.name, found.path)]
    assert (info.library, info.version) == (found.name, found.version)
    assert (info.path, info.transport) == (found.path, found.transport)
    assert (info.interface, info.address) == ("lo", "127.0.0.1")
    assert info.self_test.passed
    said = f"gloo: {found} over {found.transport}, interface lo (127.0.0.1), self-test "
    assert f"{said}passed in 0.25 s" in str(info)
    assert f"GlooInfo(library='{found.name}'" in repr(info)


def test_ranks_with_different_libraries_are_told_so() -> None:
    check_libraries(["xoscar 0.12.2"] * 3)
    with pytest.raises(DistBackendError) as caught:
        check_libraries(["pygloo 0.2.1", "xoscar 0.12.2", "pygloo 0.2.1"])
    assert "ranks 0, 2: pygloo 0.2.1; rank 1: xoscar 0.12.2" in str(caught.value)


def one_each(me: Rank) -> str:
    os.environ["RANKSCOPE_GLOO"] = [*installed()][me.rank]
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        with pytest.raises(DistBackendError) as caught:
            made.barrier().wait()
        made.shutdown()
    return str(caught.value)


@pytest.mark.skipif(len(installed()) < 2, reason="one gloo library is installed")
def test_a_group_of_both_libraries_fails_at_the_rendezvous() -> None:
    for said in run_ranks(2, one_each):
        assert "the ranks of the group use different gloo libraries" in said
