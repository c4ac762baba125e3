"""Arrays of torch's float8 dtypes: cupy has no such dtype, so the data are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Float8", "Float8Array", "float8_of"]


@dataclass(frozen=True)
class Float8:
    """The attributes of `numpy.dtype` that the backends use; `itemsize` is in bytes.

    `kind` is the same as that of the dtypes of the package ml_dtypes.
    """

    name: str
    kind: str = "V"
    itemsize: int = 1

    def __str__(self) -> str:
        return self.name


_DTYPES = {
    "torch.float8_e4m3fn": Float8("float8_e4m3fn"),
    "torch.float8_e5m2": Float8("float8_e5m2"),
}


def float8_of(tensor: Any) -> Float8 | None:
    """Return the dtype of a torch tensor of float8, ``None`` for any other."""
    return _DTYPES.get(str(tensor.dtype))


class Float8Array:
    """An array of `dtype` that uses the memory of `data`, an array of bytes.

    Other attributes (shape, device, address, flags) are read from `data`.
    """

    def __init__(self, data: Any, dtype: Float8) -> None:
        self._bytes, self.dtype = data, dtype

    def __getitem__(self, index: Any) -> Float8Array:
        return Float8Array(self._bytes[index], self.dtype)

    def reshape(self, *shape: Any) -> Float8Array:
        return Float8Array(self._bytes.reshape(*shape), self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bytes, name)
