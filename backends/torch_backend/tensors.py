"""The memory of a tensor as what Rankscope's collectives take; nothing is copied.

Of a tensor on CUDA that is a tensor, too, of which they make an array of cupy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..devices.torch_memory import host_array, shared_array

__all__ = ["memories", "memory", "require_one_order"]

_DEVICES = "cpu", "cuda"

# Dtypes that numpy lacks: an op that only moves data takes the bits.
_BITS = {
    name: bits
    for names, bits in (
        (("bfloat16",), torch.int16),
        (("complex32",), torch.int32),
        (
            ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
            torch.uint8,
        ),
    )
    for dtype in names
    if (name := getattr(torch, dtype, None)) is not None
}


def memory(tensor: torch.Tensor, where: object, *, moved: bool = False) -> Any:
    """Return an array with the memory of `tensor`, in the order of its memory.

    Of a dense tensor whose dimensions lie in another order (channels_last, a
    transposed matrix) the array has one dimension. `moved`: the op only moves data.
    ``str(where)`` names op and group.

    Raises `TypeError` for a tensor that has no such memory, `ValueError` for one that
    is not dense, or on another device than the CPU or CUDA.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where}: got a {type(tensor).__name__}; expected a tensor")
    try:
        array = shared_array(tensor)
        if array is None or not array.flags.c_contiguous:
            array = _unusual(tensor, where, moved)
    except (RuntimeError, TypeError) as error:
        # Quantized, conjugated, without memory (meta, fake, a tensor of a transform).
        raise TypeError(
            f"{where}: the memory of the tensor ({type(tensor).__name__}, "
            f"{tensor.dtype}) cannot be used: {error}"
        ) from error
    return array


def _unusual(tensor: torch.Tensor, where: object, moved: bool) -> Any:
    """Do `memory` for a tensor that numpy does not take as it is."""
    tensor = tensor.detach()
    if tensor.device.type not in _DEVICES:
        raise ValueError(
            f"{where}: the tensor is on {tensor.device}; the backend rankscope takes "
            "tensors on the CPU and on CUDA: move it there with .cpu()"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{where}: the tensor is sparse ({tensor.layout}); only all_reduce takes "
            "sparse tensors, of layout torch.sparse_coo; pass x.to_dense()"
        )
    if not tensor.is_contiguous():
        if not is_dense(tensor):
            raise ValueError(
                f"{where}: Tensors must be contiguous, or dense in another order of "
                f"their dimensions; got shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}: pass x.contiguous()"
            )
        tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    if tensor.dtype in _BITS:
        if moved:
            tensor = tensor.view(_BITS[tensor.dtype])
        elif tensor.dtype is torch.bfloat16:
            # Rankscope's own collectives have it, with the package ml_dtypes.
            return tensor
    if tensor.device.type != "cpu":
        return tensor
    return host_array(tensor)


def memories(
    tensors: Iterable[Any], where: object, *, moved: bool = False, rows: str = ""
) -> Any:
    """Return `memory` of each of `tensors`: lists of them, and ``None``, stay such.

    `rows`: they are split by rows, or another rank has them in another shape or order
    of memory. Of one that is ``"read"`` and lies in another order of its dimensions
    the array is a copy.

    Raises `ValueError` for such a one that is ``"written"``.
    """
    found: list[Any] = []
    for one in tensors:
        if isinstance(one, (list, tuple)):
            found.append(memories(one, where, moved=moved, rows=rows))
        elif one is None:
            found.append(None)
        else:
            ordered = _in_order(one, where, rows) if rows else one
            found.append(memory(ordered, where, moved=moved))
    return found


def _in_order(tensor: Any, where: object, rows: str) -> Any:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout is not torch.strided
        or tensor.is_contiguous()
    ):
        return tensor
    if rows == "read":
        return tensor.detach().contiguous()
    raise ValueError(
        f"{where}: Tensors must be contiguous that are written by rows, or from "
        f"another rank; got strides {tensor.stride()} for shape "
        f"{tuple(tensor.shape)}: pass out = torch.empty(x.shape), and x.copy_(out) "
        "after it"
    )


def require_one_order(tensors: Iterable[Any], where: object) -> None:
    """Raise `ValueError` where tensors of one shape lie in memory in several orders.

    An op moves memory: the elements would come to other places, and no error tell.
    """
    orders: dict[Any, Any] = {}
    for one in tensors:
        for tensor in one if isinstance(one, (list, tuple)) else (one,):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            shape, strides = tuple(tensor.shape), tensor.stride()
            order = [
                step for step, size in zip(strides, shape, strict=True) if size > 1
            ]
            if tensor.numel() and orders.setdefault(shape, order) != order:
                raise ValueError(
                    f"{where}: tensors of shape {shape} lie in memory in different "
                    "orders of their dimensions, so that elements would change their "
                    "places: pass x.contiguous(), or results of torch.empty_like(x)"
                )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` fills its memory without gaps, in some order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
