"""Arrays of torch's float8, which cupy has no dtype for: their bytes, and its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Float8", "Float8Array", "float8_of"]


@dataclass(frozen=True)
class Float8:
    """As much of a dtype as is needed; `kind` is that of ml_dtypes' ones."""

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
    """The dtype of a tensor of torch, if it is one of these."""
    return _DTYPES.get(str(tensor.dtype))


class Float8Array:
    """`data`, an array of bytes, as one of `dtype`; shares its memory.

    Shape, device, address and flags are those of the bytes.
    """

    def __init__(self, data: Any, dtype: Float8) -> None:
        self._bytes, self.dtype = data, dtype

    def __getitem__(self, index: Any) -> Float8Array:
        return Float8Array(self._bytes[index], self.dtype)

    def reshape(self, *shape: Any) -> Float8Array:
        """As an array's."""
        return Float8Array(self._bytes.reshape(*shape), self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bytes, name)
