"""Arrays of other libraries: how they become the backend's, and what is refused.

cupy is stood in for, by a module that shares what it is given.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankscope.backends.devices.arrays import device_type, native
from rankscope.backends.devices.cuda_install import install_command


class Cupy(np.ndarray):
    """cupy's array."""


class Foreign:
    """An array of a library that nobody knows, on CUDA."""

    def __init__(self, *, strided: bool = False) -> None:
        self.memory = np.zeros(8)[:: 2 if strided else 1]
        self.shape, self.dtype, self.size = (4,), self.memory.dtype, 4
        self.fails: Exception | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        if self.fails:
            raise self.fails
        return self.memory.view(Cupy)


class Immutable(Foreign):
    """As jax's: DLPack does not say it, the other interface does."""

    __cuda_array_interface__ = {"data": (1, True)}  # noqa: RUF012 - as it is


class Interface:
    """As numba's arrays."""

    __cuda_array_interface__ = {"data": (1, False)}  # noqa: RUF012 - as it is


Tensor = type("Tensor", (Foreign,), {"__module__": "torch"})


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(ndarray=Cupy, from_dlpack=lambda array: array.__dlpack__())
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


def taken(array: Any, *, writable: bool = True) -> Any:
    return native(array, "cuda", "tensor", "all_reduce", writable=writable)


@pytest.mark.parametrize("kind", [Foreign, Tensor])
@pytest.mark.usefixtures("cupy")
def test_cuda_arrays_become_cupys(kind: type[Foreign]) -> None:
    array = kind()
    made = taken(array)
    assert type(made) is Cupy
    assert np.shares_memory(made, array.memory)
    assert taken(made) is made


@pytest.mark.usefixtures("cupy")
def test_what_must_not_be_written_may_be_read() -> None:
    assert type(taken(Immutable(), writable=False)) is Cupy
    with pytest.raises(
        ValueError, match=r"tensor is read-only; .*keep it \(x = cupy.array\(x\)\)"
    ):
        taken(Immutable())


@pytest.mark.parametrize(
    "error", [BufferError("why"), RuntimeError("why"), ValueError("why")]
)
@pytest.mark.parametrize("kind", [Foreign, Tensor])
@pytest.mark.usefixtures("cupy")
def test_what_cannot_be_shared_says_why(kind: type[Foreign], error: Exception) -> None:
    array = kind()
    array.fails = error
    with pytest.raises(
        TypeError,
        match=r"tensor \(a .* on CUDA\) cannot be shared with cupy through DLPack: why",
    ):
        taken(array)


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy_the_backend_says_what_it_needs() -> None:
    array = Foreign()
    assert taken(array) is array
    with pytest.raises(
        TypeError, match=f"needs cupy, .*: {re.escape(install_command())}"
    ):
        taken(Tensor())


@pytest.mark.usefixtures("cupy")
def test_what_exports_nothing_is_left_as_it_is() -> None:
    array = SimpleNamespace(shape=(1,), dtype=np.dtype("f4"), size=1)
    assert taken(array) is array


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (Foreign, r"pass cupy\.ascontiguousarray\(x\)"),
        (Tensor, r"pass x\.contiguous\(\)"),
        (None, r"pass cupy\.ascontiguousarray\(x\)"),
    ],
)
@pytest.mark.usefixtures("cupy")
def test_the_way_to_a_contiguous_array_is_the_librarys(
    kind: type[Foreign] | None, remedy: str
) -> None:
    array = np.zeros(8).view(Cupy)[::2] if kind is None else kind(strided=True)
    with pytest.raises(ValueError, match=f"is not C-contiguous; {remedy}"):
        taken(array)


def test_an_array_without_dlpack_is_to_be_wrapped() -> None:
    with pytest.raises(
        TypeError, match=r"is a Interface; .*; wrap it: cupy\.asarray\(x\)$"
    ):
        device_type(Interface(), "tensor", "all_reduce")
    with pytest.raises(TypeError, match=r"a torch tensor\)$"):
        device_type([1.0], "tensor", "all_reduce")
