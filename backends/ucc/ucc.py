"""The part of UCC's C interface that is used here: constants, structs, functions.

It is written after ``ucc/api/ucc.h``, whose structs only ever grow at the end and carry
masks of the fields that the caller has set. A test compiles C against the header and
compares every size, offset and constant below.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "STRUCTS",
    "AllGather",
    "Arguments",
    "ContextParameters",
    "Function",
    "LibraryParameters",
    "OutOfBand",
    "RequestCall",
    "TeamParameters",
]

#: The constants used, by the header's names.
CONSTANTS = {
    "UCC_OK": 0,
    "UCC_INPROGRESS": 1,
    "UCC_ERR_NO_MESSAGE": -6,
    "UCC_COLL_TYPE_ALLGATHER": 1 << 0,
    "UCC_COLL_TYPE_ALLGATHERV": 1 << 1,
    "UCC_COLL_TYPE_ALLREDUCE": 1 << 2,
    "UCC_COLL_TYPE_ALLTOALLV": 1 << 4,
    "UCC_COLL_TYPE_BARRIER": 1 << 5,
    "UCC_COLL_TYPE_BCAST": 1 << 6,
    "UCC_COLL_TYPE_GATHERV": 1 << 10,
    "UCC_COLL_TYPE_REDUCE": 1 << 11,
    "UCC_COLL_TYPE_REDUCE_SCATTERV": 1 << 13,
    "UCC_COLL_TYPE_SCATTERV": 1 << 15,
    "UCC_MEMORY_TYPE_HOST": 0,
    "UCC_DT_INT8": 0 << 3,
    "UCC_DT_INT16": 1 << 3,
    "UCC_DT_INT32": 2 << 3,
    "UCC_DT_INT64": 3 << 3,
    "UCC_DT_UINT8": 5 << 3,
    "UCC_DT_UINT16": 6 << 3,
    "UCC_DT_UINT32": 7 << 3,
    "UCC_DT_UINT64": 8 << 3,
    "UCC_DT_FLOAT32": 11 << 3,
    "UCC_DT_FLOAT64": 12 << 3,
    "UCC_DT_FLOAT32_COMPLEX": 15 << 3,
    "UCC_DT_FLOAT64_COMPLEX": 16 << 3,
    "UCC_OP_SUM": 0,
    "UCC_OP_PROD": 1,
    "UCC_OP_MAX": 2,
    "UCC_OP_MIN": 3,
    "UCC_OP_BAND": 7,
    "UCC_OP_BOR": 8,
    "UCC_OP_BXOR": 9,
    "UCC_THREAD_MULTIPLE": 2,
    "UCC_LIB_PARAM_FIELD_THREAD_MODE": 1 << 0,
    "UCC_CONTEXT_PARAM_FIELD_OOB": 1 << 2,
    "UCC_TEAM_PARAM_FIELD_EP": 1 << 2,
    "UCC_TEAM_PARAM_FIELD_EP_RANGE": 1 << 4,
    "UCC_TEAM_PARAM_FIELD_OOB": 1 << 7,
    "UCC_COLLECTIVE_EP_RANGE_CONTIG": 0,
    "UCC_COLL_ARGS_FIELD_FLAGS": 1 << 0,
    "UCC_COLL_ARGS_FIELD_TAG": 1 << 1,
    "UCC_COLL_ARGS_FIELD_ACTIVE_SET": 1 << 4,
    "UCC_COLL_ARGS_FLAG_IN_PLACE": 1 << 0,
    "UCC_COLL_ARGS_FLAG_COUNT_64BIT": 1 << 2,
    "UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT": 1 << 3,
}

#: ``ucc_status_t``.
Status = c_int

#: ``ucc_oob_coll_t.allgather``: own bytes, all bytes, how many of one rank,
#: `coll_info`, where the request goes.
AllGather = ctypes.CFUNCTYPE(
    Status, c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_void_p)
)
#: ``req_test`` and ``req_free``: of a request.
RequestCall = ctypes.CFUNCTYPE(Status, c_void_p)


class LibraryParameters(ctypes.Structure):
    """``ucc_lib_params_t``."""

    _fields_ = (
        ("mask", c_uint64),
        ("thread_mode", c_int),
        ("coll_types", c_uint64),
        ("reduction_types", c_uint64),
        ("sync_type", c_int),
    )


class OutOfBand(ctypes.Structure):
    """``ucc_oob_coll_t``: an all-gather for the set-up, which the caller has."""

    _fields_ = (
        ("allgather", AllGather),
        ("req_test", RequestCall),
        ("req_free", RequestCall),
        ("coll_info", c_void_p),
        ("n_oob_eps", ctypes.c_uint32),
        ("oob_ep", ctypes.c_uint32),
    )


class _MemoryMap(ctypes.Structure):
    """``ucc_mem_map_params_t``."""

    _fields_ = (("segments", c_void_p), ("n_segments", c_uint64))


class ContextParameters(ctypes.Structure):
    """``ucc_context_params_t``."""

    _fields_ = (
        ("mask", c_uint64),
        ("type", c_int),
        ("sync_type", c_int),
        ("oob", OutOfBand),
        ("ctx_id", c_uint64),
        ("mem_params", _MemoryMap),
    )


class _PeerConnections(ctypes.Structure):
    """``ucc_team_p2p_conn_t``."""

    _fields_ = (
        ("conn_info_lookup", c_void_p),
        ("conn_info_release", c_void_p),
        ("conn_ctx", c_void_p),
        ("req_test", c_void_p),
        ("req_free", c_void_p),
    )


class _EndpointMap(ctypes.Structure):
    """``ucc_ep_map_t``; `kind` stands for its union."""

    _fields_ = (("type", c_int), ("ep_num", c_uint64), ("kind", c_uint64 * 2))


class TeamParameters(ctypes.Structure):
    """``ucc_team_params_t``."""

    _fields_ = (
        ("mask", c_uint64),
        ("flags", c_uint64),
        ("ordering", c_int),
        ("outstanding_colls", c_uint64),
        ("ep", c_uint64),
        ("ep_list", c_void_p),
        ("ep_range", c_int),
        ("team_size", c_uint64),
        ("sync_type", c_int),
        ("oob", OutOfBand),
        ("p2p_conn", _PeerConnections),
        ("mem_params", _MemoryMap),
        ("ep_map", _EndpointMap),
        ("id", c_uint64),
    )


class _Buffer(ctypes.Structure):
    """``ucc_coll_buffer_info_t``."""

    _fields_ = (
        ("buffer", c_void_p),
        ("count", c_uint64),
        ("datatype", c_uint64),
        ("mem_type", c_int),
    )


class _Buffers(ctypes.Structure):
    """``ucc_coll_buffer_info_v_t``: a part for each rank."""

    _fields_ = (
        ("buffer", c_void_p),
        ("counts", c_void_p),
        ("displacements", c_void_p),
        ("datatype", c_uint64),
        ("mem_type", c_int),
    )


class _Data(ctypes.Union):
    _fields_ = (("info", _Buffer), ("info_v", _Buffers))


class _Callback(ctypes.Structure):
    """``ucc_coll_callback_t``."""

    _fields_ = (("cb", c_void_p), ("data", c_void_p))


class _ActiveSet(ctypes.Structure):
    """The ranks `start`, `start` + `stride`, … that take part, `size` of them."""

    _fields_ = (("start", c_uint64), ("stride", ctypes.c_int64), ("size", c_uint64))


class Arguments(ctypes.Structure):
    """``ucc_coll_args_t``."""

    _fields_ = (
        ("mask", c_uint64),
        ("coll_type", c_int),
        ("src", _Data),
        ("dst", _Data),
        ("op", c_int),
        ("flags", c_uint64),
        ("root", c_uint64),
        ("error_type", c_int),
        ("tag", ctypes.c_uint16),
        ("global_work_buffer", c_void_p),
        ("cb", _Callback),
        ("timeout", ctypes.c_double),
        ("active_set", _ActiveSet),
        ("src_memh", c_void_p),
        ("dst_memh", c_void_p),
    )


#: The structs above that have a name of their own in the header.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ucc_lib_params_t": LibraryParameters,
    "ucc_oob_coll_t": OutOfBand,
    "ucc_mem_map_params_t": _MemoryMap,
    "ucc_context_params_t": ContextParameters,
    "ucc_team_p2p_conn_t": _PeerConnections,
    "ucc_team_params_t": TeamParameters,
    "ucc_coll_buffer_info_t": _Buffer,
    "ucc_coll_buffer_info_v_t": _Buffers,
    "ucc_coll_callback_t": _Callback,
    "ucc_coll_args_t": Arguments,
}


class Function(NamedTuple):
    """A function of the library: its name, result and arguments."""

    name: str
    result: Any
    arguments: Sequence[Any]


_Handle = c_void_p

FUNCTIONS = (
    # const char *ucc_get_version_string(void)
    Function("ucc_get_version_string", c_char_p, ()),
    # const char *ucc_status_string(ucc_status_t)
    Function("ucc_status_string", c_char_p, (Status,)),
    # ucc_status_t ucc_lib_config_read(const char *, const char *, ucc_lib_config_h *)
    Function("ucc_lib_config_read", Status, (c_char_p, c_char_p, POINTER(c_void_p))),
    # void ucc_lib_config_release(ucc_lib_config_h)
    Function("ucc_lib_config_release", None, (_Handle,)),
    # ucc_status_t ucc_init_version(unsigned, unsigned, const ucc_lib_params_t *,
    #                               const ucc_lib_config_h, ucc_lib_h *)
    Function(
        "ucc_init_version",
        Status,
        (c_uint, c_uint, POINTER(LibraryParameters), _Handle, POINTER(c_void_p)),
    ),
    # ucc_status_t ucc_context_config_read(ucc_lib_h, const char *,
    #                                      ucc_context_config_h *)
    Function("ucc_context_config_read", Status, (_Handle, c_char_p, POINTER(c_void_p))),
    # void ucc_context_config_release(ucc_context_config_h)
    Function("ucc_context_config_release", None, (_Handle,)),
    # ucc_status_t ucc_context_create(ucc_lib_h, const ucc_context_params_t *,
    #                                 const ucc_context_config_h, ucc_context_h *)
    Function(
        "ucc_context_create",
        Status,
        (_Handle, POINTER(ContextParameters), _Handle, POINTER(c_void_p)),
    ),
    # ucc_status_t ucc_context_progress(ucc_context_h)
    Function("ucc_context_progress", Status, (_Handle,)),
    # ucc_status_t ucc_context_destroy(ucc_context_h)
    Function("ucc_context_destroy", Status, (_Handle,)),
    # ucc_status_t ucc_team_create_post(ucc_context_h *, uint32_t,
    #                                   const ucc_team_params_t *, ucc_team_h *)
    Function(
        "ucc_team_create_post",
        Status,
        (
            POINTER(c_void_p),
            ctypes.c_uint32,
            POINTER(TeamParameters),
            POINTER(c_void_p),
        ),
    ),
    # ucc_status_t ucc_team_create_test(ucc_team_h)
    Function("ucc_team_create_test", Status, (_Handle,)),
    # ucc_status_t ucc_team_destroy(ucc_team_h)
    Function("ucc_team_destroy", Status, (_Handle,)),
    # ucc_status_t ucc_collective_init(ucc_coll_args_t *, ucc_coll_req_h *, ucc_team_h)
    Function(
        "ucc_collective_init", Status, (POINTER(Arguments), POINTER(c_void_p), _Handle)
    ),
    # ucc_status_t ucc_collective_post(ucc_coll_req_h)
    Function("ucc_collective_post", Status, (_Handle,)),
    # ucc_status_t ucc_collective_finalize(ucc_coll_req_h)
    Function("ucc_collective_finalize", Status, (_Handle,)),
)
