"""Which gloo library is used, and what is said where there is none."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig

import pytest
from packaging.requirements import Requirement

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.errors import DistBackendError
from rankscope.backends.gloo import library
from rankscope.backends.gloo.backend import GlooBackend
from rankscope.backends.gloo.library import Library, installed, unavailable
from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.messaging.connecting import different
from rankscope.backends.rank_sets import name_ranks

pytestmark = pytest.mark.skipif(not installed(), reason="no gloo library is installed")

each_library = pytest.mark.parametrize("found", installed().values(), ids=str)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


BOTH = {
    "pygloo": Library("pygloo", "0.2.1", "/p.so"),
    "xoscar": Library("xoscar", "0.12.2", "/x.so"),
}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: BOTH)


@pytest.mark.usefixtures("both")
def test_an_option_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.chosen() == BOTH["pygloo"]
    monkeypatch.setenv("RANKSCOPE_GLOO", "xoscar")
    assert library.chosen() == BOTH["xoscar"]
    assert not library.has_options()
    with dist.gloo_options(library="pygloo"):
        assert library.has_options()
        assert library.chosen() == BOTH["pygloo"]
        with dist.gloo_options():
            assert library.chosen() == BOTH["pygloo"]
    assert library.chosen() == BOTH["xoscar"]


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
    remedy = f"for this Python: {pip_install(with_extra('gloo'))}. The default"
    assert remedy in (unavailable() or "")
    with pytest.raises(DistBackendError, match="neither"):
        dist.gloo_info()
    monkeypatch.setattr(library, "installed", lambda: {"xoscar": BOTH["xoscar"]})
    assert unavailable() is None
    monkeypatch.setenv("RANKSCOPE_GLOO", "pygloo")
    assert "RANKSCOPE_GLOO names pygloo, which is not installed" in (
        unavailable() or ""
    )
    monkeypatch.setattr(library, "installed", lambda: {"pygloo": BOTH["pygloo"]})
    monkeypatch.setenv("RANKSCOPE_GLOO", "xoscar")
    assert pip_install("--no-deps 'xoscar>=0.12,<0.13'") in (unavailable() or "")


def test_the_extra_has_the_versions_of_the_remedies() -> None:
    found = [Requirement(one) for one in importlib.metadata.requires("rankscope") or ()]
    extra = {
        one.name: one.specifier for one in found if 'extra == "gloo"' in str(one.marker)
    }
    words = [each[-1].strip("'") for each in library._REQUIREMENTS.values()]
    remedies = {one.name: one.specifier for one in map(Requirement, words)}
    assert extra == remedies


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
    info = dist.gloo_info()
    assert (info.library, info.version) == (found.name, found.version)
    assert (info.path, info.transport) == (found.path, found.transport)
    assert (info.interface, info.address) == ("lo", "127.0.0.1")
    said = f"gloo: {found} over {found.transport}, interface lo (127.0.0.1)\n"
    assert said in str(info)
    assert f"GlooInfo(library='{found.name}'" in repr(info)


def test_ranks_with_different_libraries_are_told_so() -> None:
    libraries = ["pygloo 0.2.1", "xoscar 0.12.2", "pygloo 0.2.1"]
    said = different(libraries, "gloo libraries", name_ranks)
    assert "ranks 0, 2: pygloo 0.2.1; rank 1: xoscar 0.12.2" in said


def one_each(me: Rank) -> str:
    os.environ["RANKSCOPE_GLOO"] = [*installed()][me.rank]
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        with pytest.raises(DistBackendError) as caught:
            made.barrier().wait()
        made.shutdown()
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.skipif(len(installed()) < 2, reason="one gloo library is installed")
def test_a_group_of_both_libraries_fails_at_the_rendezvous() -> None:
    for said in run_ranks(2, one_each):
        assert "the ranks of the group use different gloo libraries" in said
