"""Backends of installed packages: found by entry point, imported at first use.

Each package here is a real one: a wheel that is installed into a folder which
is then put on the path.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.groups.world import world
from rankscope.backends.interface import registry as plugins
from rankscope.backends.interface.registry import builtin_devices

pytestmark = pytest.mark.processes

# Zeroes what it is given, at once.
SOURCE = """
import rankscope as dist

class Zero(dist.Backend):
    def all_reduce(self, tensor, op):
        tensor[...] = 0
        work = dist.Work()
        work.mark_started()
        work.mark_completed()
        return work

def register():
    dist.Backend.register_backend(
        {name!r}, lambda store, rank, size, timeout: Zero(rank, size),
        devices=["cpu", "ext"],
    )

def register_another():
    dist.Backend.register_backend("another", lambda *_: None, devices="cpu")

class Old(Zero):
    interface_version = 0

def register_old():
    dist.Backend.register_backend({name!r}, lambda *_: Old(0, 1), devices="cpu")

def fail():
    raise OSError("libzero.so.3 is missing")

def nothing():
    pass
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one entry point; returns its module's name."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: list[str] = []
    # The built-in backends register once, when they are imported.
    before = {*dist.Backend.registry, *builtin_devices()}

    def make(
        package: str, name: str, value: str = "{module}:register", pip: bool = False
    ) -> str:
        module = package.replace("-", "_")
        wheel = _wheel(
            tmp_path,
            package,
            module,
            SOURCE.format(name=name),
            f"{name} = {value.format(module=module)}",
        )
        if pip:
            _pip_install(wheel, site)
        else:  # what it comes down to, without the second that pip takes
            zipfile.ZipFile(wheel).extractall(site)
        importlib.invalidate_caches()
        modules.append(module)
        return module

    yield make
    for module in modules:
        sys.modules.pop(module, None)
    for name in set(dist.Backend.registry) - before:
        del dist.Backend.registry[name]


def _pip_install(wheel: Path, site: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index"),
            *("--no-deps", "--no-compile", "--disable-pip-version-check"),
            *("--target", site, wheel),
        ],
        check=True,
    )


def _wheel(folder: Path, package: str, module: str, source: str, entry: str) -> Path:
    path = folder / f"{module}-1.5-py3-none-any.whl"
    info = f"{module}-1.5.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: rankscope tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{plugins.GROUP}]\n{entry}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Make the default group, of one rank, with the given config."""
    store = dist.FileStore(str(tmp_path / "store"), 1)

    def init(config: str) -> None:
        dist.init_process_group(config, store=store, rank=0, world_size=1)

    yield init
    if dist.is_initialized():
        dist.destroy_process_group()
    store.close()


def devices() -> Mapping[str, str]:
    return world.get_group().summary().devices


def test_an_installed_backend_is_there_without_an_import(
    install: Install, one_rank: Callable[[str], None]
) -> None:
    module = install("rankscope-zero", "zero", pip=True)
    one_rank("cpu:zero")
    assert devices() == {"cpu": "zero (not built)"}
    assert module not in sys.modules
    x = np.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [0, 0, 0]
    assert module in sys.modules
    assert devices() == {"cpu": "zero"}
    assert dist.get_backend_config() == "cpu:zero"
    assert dist.is_backend_available("zero")
    with pytest.raises(
        NotImplementedError, match="backend 'zero' does not implement broadcast"
    ):
        dist.broadcast(x, src=0)


def test_an_installed_backend_of_an_old_interface_version_is_refused(
    install: Install, one_rank: Callable[[str], None]
) -> None:
    install("rankscope-zero", "zero", value="{module}:register_old")
    one_rank("cpu:zero")
    with pytest.raises(
        dist.DistBackendError,
        match="backend 'zero' is written for version 0 of the backend interface, and "
        "this Rankscope has version 1: update the package that provides the backend$",
    ):
        dist.all_reduce(np.ones(3))


def test_a_part_with_an_installed_backend_is_parsed_without_an_import(
    install: Install,
) -> None:
    module = install("rankscope-zero", "zero")
    assert str(dist.BackendConfig("cuda:zero")) == "cuda:zero"
    with pytest.raises(ValueError, match="device type 'gpu'; .* did you mean cuda"):
        dist.BackendConfig("gpu:zero")
    assert module not in sys.modules


def test_a_name_alone_means_every_device_the_package_registers_it_for(
    install: Install,
) -> None:
    install("rankscope-zero", "zero")
    assert dist.BackendConfig("zero").device_backend_map == {
        "cpu": "zero",
        "ext": "zero",
    }


def test_a_registered_name_goes_before_an_installed_one(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("rankscope-zero", "zero")
    monkeypatch.setattr(plugins, "declared", lambda: pytest.fail("read the metadata"))
    dist.Backend.register_backend("zero", lambda *_: dist.Backend(0, 1), devices="cpu")
    assert dist.BackendConfig("zero").device_backend_map == {"cpu": "zero"}
    assert dist.BackendConfig("cpu:tcp,cuda:nccl").device_backend_map["cpu"] == "tcp"
    assert module not in sys.modules


def test_a_package_cannot_take_the_place_of_a_built_in(install: Install) -> None:
    module = install("rankscope-mine", "tcp")
    assert dist.BackendConfig("tcp").device_backend_map == {"cpu": "tcp"}
    dist.is_backend_available("tcp")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("{module}:fail", "could not be loaded: OSError: libzero.so.3 is missing"),
        ("{module}:absent", "could not be loaded: AttributeError"),
        ("no_such_module:register", "could not be loaded: ModuleNotFoundError"),
        ("{module}", "could not be loaded: TypeError: 'module' object"),
        ("{module}:nothing", "registered no backend called 'broken'"),
        ("{module}:register_another", "registered no backend called 'broken'"),
    ],
)
def test_a_broken_entry_point_is_one_clear_error_at_first_use(
    install: Install, one_rank: Callable[[str], None], value: str, what: str
) -> None:
    install("rankscope-broken", "broken", value)
    install("rankscope-zero", "zero")
    one_rank("cpu:zero,ext:broken")
    x = np.ones(3)
    dist.all_reduce(x)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.barrier(device="ext")
    text = str(caught.value)
    assert text.startswith("barrier in group 'default' on rank 0: backend 'broken' of")
    assert "package rankscope-broken 1.5 (entry point broken = '" in text
    assert what in text
    # The other device, and the numbering, are as they were.
    dist.all_reduce(x)
    assert world.get_group().status.collective_seq == 2
    assert not dist.is_backend_available("broken")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("rankscope-one", "zero")
    install("rankscope-two", "zero")
    with pytest.raises(dist.DistBackendError, match="several packages: ") as caught:
        dist.BackendConfig("zero")
    assert "rankscope-one 1.5" in str(caught.value)
    assert "rankscope-two 1.5" in str(caught.value)


def test_an_unknown_name_lists_what_packages_declare(install: Install) -> None:
    install("rankscope-zero", "zero")
    known = "nccl, tcp, ucx, zero"
    with pytest.raises(ValueError, match=f"unknown backend 'nil' .*{known}"):
        dist.BackendConfig("cpu:nil")
    assert not dist.is_backend_available("nil")


def test_a_package_removed_meanwhile_is_missed_at_first_use(
    install: Install,
    one_rank: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("rankscope-zero", "zero")
    one_rank("cpu:zero")
    monkeypatch.undo()  # its folder is not on the path any more
    with pytest.raises(dist.DistBackendError, match="no installed package declares"):
        dist.barrier()
