"""The search for NaN in the inputs of an op, before the op starts.

Off by default: the search reads every input once more, and waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..devices.cuda_driver import Cuda
from ..errors import DistBackendError
from ..interface.base import Array
from ..work.op_type import OpType

__all__ = ["refuse_nan"]

# Dtype → an unsigned dtype of its size, the bits without the sign, and infinity. More
# than infinity is NaN, also in the dtypes that cupy cannot compute with.
_FLOATS = {
    "float16": ("uint16", 0x7FFF, 0x7C00),
    "bfloat16": ("uint16", 0x7FFF, 0x7F80),
    "float32": ("uint32", 0x7FFF_FFFF, 0x7F80_0000),
    "float64": ("uint64", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    # No infinity: the largest number.
    "float8_e4m3fn": ("uint8", 0x7F, 0x7E),
    "float8_e5m2": ("uint8", 0x7F, 0x7C),
}
# Pairs of floats.
_FLOATS |= {"complex64": _FLOATS["float32"], "complex128": _FLOATS["float64"]}


def refuse_nan(cuda: Cuda, kind: OpType, arrays: Sequence[Array], ops: int = 1) -> None:
    """Raise `DistBackendError` if an input of so many `ops` on `arrays` has a NaN."""
    inputs = kind.spec.read_of(arrays, ops)
    if any(map(cuda.capturing, cuda.current_streams(cuda.device_of(arrays[0])))):
        return
    for place, array in enumerate(inputs):
        bits = _FLOATS.get(array.dtype.name)
        if bits is not None and array.size and cuda.has_more(array, *bits):
            several = len(inputs) > 1
            which = f"input {place} (of {len(inputs)})" if several else "the input"
            raise DistBackendError(
                f"{which} on this rank has a NaN "
                f"(shape {tuple(array.shape)}, {array.dtype.name}); the op was not "
                "started. RANKSCOPE_NCCL_NAN_CHECK or TORCH_NCCL_NAN_CHECK is on"
            )
