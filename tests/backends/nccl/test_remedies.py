"""What a person is told who cannot use NCCL, or asks it for what it has not."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.nccl import nccl4py as nccl_library
from rankscope.backends.nccl.options import options


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}")
        self.status = status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine: ``driver(status, version=…, there=…, cupy=…)`` says what it lacks."""

    def make(
        status: int, version: int = 0, there: bool = False, cupy: int | None = 13
    ) -> str | None:
        def count() -> int:
            if status:
                raise CUDARuntimeError(status)
            return 1

        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=count,
            driverGetVersion=lambda: version,
        )
        module = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setitem(sys.modules, "cupy", module)
        device = tmp_path / "nvidiactl"
        if there:
            device.touch()
        monkeypatch.setattr(nccl_library, "DRIVER_FILES", (str(device),))
        installed(monkeypatch, cupy)
        return nccl_library._no_device()

    return make


def installed(monkeypatch: pytest.MonkeyPatch, cuda: int | None) -> None:
    """Have the wheel of cupy for this CUDA, and no other, be installed."""

    def distribution(name: str) -> object:
        if name == f"cupy-cuda{cuda}x":
            return object()
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


def test_a_gpu_is_fine(driver: Any) -> None:
    assert driver(0) is None


def test_no_device_is_not_no_driver(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert driver(100) == (
        "there is no NVIDIA GPU that this process may use; CUDA_VISIBLE_DEVICES is '': "
        "unset it, or name GPUs that nvidia-smi -L lists"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert driver(100) == (
        "there is no NVIDIA GPU that this process may use; does nvidia-smi -L list one?"
    )


def test_no_driver_is_told_from_an_old_one(driver: Any) -> None:
    absent = driver(35)
    assert absent.startswith("there is no usable NVIDIA driver here (cudaError35)")
    assert driver(35, version=12040, there=True) == (
        "the NVIDIA driver here is too old, it is for CUDA 12.4 (cudaError35): update "
        f"the driver, or use CUDA 12: {pip_install(with_extra('cuda12'))}"
    )
    assert driver(35, version=11080, there=True).endswith(": update the driver")
    assert driver(35, version=12040, there=True, cupy=12).endswith(
        ": update the driver"
    )
    assert "too old, or its libcuda.so.1 is missing (" in driver(35, there=True)
    assert driver(999, there=True).startswith("there is no usable NVIDIA driver here")


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [
        (12, pip_install(with_extra("cuda12"))),
        (13, pip_install(with_extra("cuda13"))),
        (
            None,
            f"{pip_install(with_extra('cuda13'))} (CUDA 12: {with_extra('cuda12')})",
        ),
    ],
)
def test_what_is_missing_is_named_for_the_cuda_that_is_there(
    monkeypatch: pytest.MonkeyPatch, cuda: int | None, remedy: str
) -> None:
    installed(monkeypatch, cuda)
    assert nccl_library._not_installed("no_such_module", "nccl4py") == (
        f"NCCL needs nccl4py, which is not installed: {remedy}"
    )


def test_a_missing_library_is_named_for_the_cuda_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = SimpleNamespace(get_version=lambda: SimpleNamespace(libnccl=None))
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    installed(monkeypatch, 12)
    reason = nccl_library._no_library()
    assert reason is not None
    assert reason.startswith(
        f"libnccl.so.2 is not there: {pip_install(with_extra('cuda12'))}"
    )
    assert reason.endswith("pip install nvidia-nccl-cu12")


# -- options -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"min_ctas": 0}, "min_ctas=0; expected at least 1"),
        ({"max_ctas": -4}, "max_ctas=-4; expected at least 1"),
        ({"min_ctas": 5, "max_ctas": 4}, "min_ctas=5 is more than max_ctas=4"),
        (
            {"min_ctas": 4},
            "min_ctas=4 without max_ctas, which NCCL refuses; give both, for instance "
            "min_ctas=4, max_ctas=32",
        ),
        ({"cga_cluster_size": -1}, "cga_cluster_size=-1; expected 0 to 8"),
        ({"cga_cluster_size": 9}, "cga_cluster_size=9; expected 0 to 8"),
        ({"nvls_ctas": 0}, "nvls_ctas=0; expected at least 1"),
        ({"n_channels_per_net_peer": 0}, "expected at least 1"),
        ({"traffic_class": -1}, "traffic_class=-1; expected at least 0"),
        ({"cta_policy": -1}, "cta_policy=-1; expected at least 0"),
        ({"min_cta": 1}, "there is no 'min_cta'"),
    ],
)
def test_options_out_of_range_are_refused(chosen: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(ValueError, match=f"nccl_options: .*{said}"),
        dist.nccl_options(**chosen),
    ):
        pass
    assert options() == {}


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"min_ctas": True}, "min_ctas=True; expected int"),
        ({"collnet_enable": 1}, "collnet_enable=1; expected bool"),
        ({"net_name": 3}, "net_name=3; expected str"),
    ],
)
def test_options_of_another_type_are_refused(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said), dist.nccl_options(**chosen):
        pass


def test_options_of_two_blocks_have_to_fit_each_other() -> None:
    with dist.nccl_options(max_ctas=4, cga_cluster_size=8, collnet_enable=True):
        with (
            pytest.raises(ValueError, match="min_ctas=5 is more than max_ctas=4"),
            dist.nccl_options(min_ctas=5),
        ):
            pass
        with dist.nccl_options(min_ctas=4, traffic_class=0):
            assert options()["min_ctas"] == 4
