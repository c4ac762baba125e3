"""The library of pygloo 0.2.1: gloo over libuv, for CPython 3.10 on Linux x86-64."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_long, c_size_t, c_uint32, c_void_p
from typing import Any

from .abi import Function, Gloo, RendezvousStore

__all__ = ["Pygloo"]


class Pygloo(Gloo):
    """gloo as pygloo's wheel has it."""

    library = "pygloo"
    version = "0.2.1"
    transport = "uv"

    _module_name = "pygloo"
    # void pygloo::allreduce_wrapper(
    #     const std::shared_ptr<gloo::Context>& context,
    #     intptr_t sendbuf, intptr_t recvbuf, size_t size,
    #     glooDataType_t datatype, ReduceOp reduceop,
    #     gloo::AllreduceOptions::Algorithm algorithm, uint32_t tag)
    _wrapper = Function(
        "_ZN6pygloo17allreduce_wrapperERKSt10shared_ptrIN4gloo7ContextEEllmNS_"
        "14glooDataType_tENS_8ReduceOpENS1_6detail20AllreduceOptionsImpl9AlgorithmEj",
        None,
        (c_void_p, c_long, c_long, c_size_t, c_int, c_int, c_int, c_uint32),
        releases_gil=True,
    )
    # gloo::Context has a vtable, and is the start of gloo::rendezvous::Context.
    _base_offset = 0
    _rank_offset = 8
    _dtype_enum, _algorithm_enum = "glooDataType_t", "allreduceAlgorithm"

    @classmethod
    def _reduction(cls, library: ctypes.PyDLL, cpp_type: str, number: int) -> int:
        # template <typename T> gloo::AllreduceOptions::Func pygloo::toFunction(
        #     const ReduceOp& reduceop)
        # `Func` is void (*)(void*, const void*, const void*, size_t).
        choose = library[
            f"_ZN6pygloo10toFunctionI{cpp_type}EEPFvPvPKvS3_mERKNS_8ReduceOpE"
        ]
        choose.restype, choose.argtypes = c_void_p, (c_void_p,)
        return choose(byref(ctypes.c_uint8(number)))

    def _make_device(self, address: str) -> Any:
        uv = self._module.transport.uv
        return uv.CreateDevice(uv.attr(address))

    def _wrap_store(self, store: RendezvousStore) -> object:
        return store
