"""The part of UCP's C interface that is used here: constants, structs, functions.

It is written after ``ucp/api/ucp.h``, whose structs only ever grow at the end and
carry masks of the fields that the caller has set. A test compiles C against the header
that comes with the library and compares every size, offset and constant below.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

__all__ = [
    "CONSTANTS",
    "FUNCTIONS",
    "ContextParameters",
    "EndpointAttributes",
    "EndpointParameters",
    "Function",
    "ReceiveInfo",
    "RequestParameters",
    "Status",
    "TransportEntry",
    "WorkerAttributes",
    "WorkerParameters",
    "word",
]

#: ``ucs_status_t`` is an enum that the header packs into one byte: read as an int it
#: would have three bytes of whatever the register held.
Status = ctypes.c_int8

#: The constants used, by the header's names.
CONSTANTS = {
    "UCP_API_MAJOR": 1,
    "UCS_OK": 0,
    "UCS_INPROGRESS": 1,
    "UCS_ERR_IO_ERROR": -3,
    "UCS_ERR_UNREACHABLE": -6,
    "UCS_ERR_MESSAGE_TRUNCATED": -9,
    "UCS_ERR_BUSY": -15,
    "UCS_ERR_CANCELED": -16,
    "UCS_ERR_SHMEM_SEGMENT": -17,
    "UCS_ERR_NOT_CONNECTED": -24,
    "UCS_ERR_CONNECTION_RESET": -25,
    "UCS_ERR_ENDPOINT_TIMEOUT": -80,
    "UCS_ERR_LAST": -100,
    "UCS_THREAD_MODE_MULTI": 2,
    "UCS_MEMORY_TYPE_HOST": 0,
    "UCP_FEATURE_TAG": 1 << 0,
    "UCP_FEATURE_WAKEUP": 1 << 4,
    "UCP_PARAM_FIELD_FEATURES": 1 << 0,
    "UCP_PARAM_FIELD_ESTIMATED_NUM_EPS": 1 << 6,
    "UCP_WORKER_PARAM_FIELD_THREAD_MODE": 1 << 0,
    "UCP_WORKER_PARAM_FIELD_FLAGS": 1 << 5,
    "UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK": 1 << 0,
    "UCP_WORKER_ATTR_FIELD_THREAD_MODE": 1 << 0,
    "UCP_WORKER_ATTR_FIELD_ADDRESS": 1 << 1,
    "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS": 1 << 0,
    "UCP_EP_ATTR_FIELD_TRANSPORTS": 1 << 3,
    "UCP_OP_ATTR_FIELD_MEMORY_TYPE": 1 << 6,
    "UCP_OP_ATTR_FIELD_RECV_INFO": 1 << 7,
}


class ContextParameters(ctypes.Structure):
    """``ucp_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParameters(ctypes.Structure):
    """``ucp_worker_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class WorkerAttributes(ctypes.Structure):
    """``ucp_worker_attr_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("address_flags", ctypes.c_uint32),
        ("address", c_void_p),
        ("address_length", c_size_t),
        ("max_am_header", c_size_t),
        ("name", ctypes.c_char * 32),
        ("max_debug_string", c_size_t),
    )


class _SocketAddress(ctypes.Structure):
    """``ucs_sock_addr_t``."""

    _fields_ = (("addr", c_void_p), ("addrlen", c_uint))


class EndpointParameters(ctypes.Structure):
    """``ucp_ep_params_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler", c_void_p * 2),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", _SocketAddress),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", _SocketAddress),
    )


class TransportEntry(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = (("transport_name", c_char_p), ("device_name", c_char_p))


class _Transports(ctypes.Structure):
    """``ucp_transports_t``."""

    _fields_ = (
        ("entries", POINTER(TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
    )


class EndpointAttributes(ctypes.Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * 32),
        # struct sockaddr_storage: 128 bytes, aligned as a long is.
        ("local_sockaddr", c_uint64 * 16),
        ("remote_sockaddr", c_uint64 * 16),
        ("transports", _Transports),
        ("user_data", c_void_p),
    )


class ReceiveInfo(ctypes.Structure):
    """``ucp_tag_recv_info_t``: the tag and the length of a message that has come."""

    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


class RequestParameters(ctypes.Structure):
    """``ucp_request_param_t``."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("remote_datatype", c_uint64),
        ("remote", c_void_p),
        ("remote_count", c_size_t),
    )


class Function(NamedTuple):
    """A function of the library: its name, result and arguments.

    `short`: it returns within a microsecond or so and is called at every message. It
    then keeps the GIL: to release it costs more than the call, and to get it back
    beside a thread that computes takes up to the switch interval, 5 ms.

    `by_words`: ctypes does not convert its arguments, which `word` has made: to convert
    the six of a receive takes 0.6 µs at every call.
    """

    name: str
    result: Any
    arguments: Sequence[Any]
    short: bool = False
    by_words: bool = False


# Handles and addresses of arrays are passed as ints. A parameter struct is passed by
# its address, too: ctypes makes no object for it at each call.
_Handle = _Address = c_void_p

#: Makes an argument out of an int, once for any number of calls. A handle, an address,
#: a ``size_t`` and a tag are all passed alike where a pointer has 64 bits.
word = c_void_p.from_param

FUNCTIONS = (
    # const char *ucp_get_version_string(void)
    Function("ucp_get_version_string", c_char_p, ()),
    # const char *ucs_status_string(ucs_status_t)
    Function("ucs_status_string", c_char_p, (Status,)),
    # ucs_status_t ucp_config_read(const char *, const char *, ucp_config_t **)
    Function("ucp_config_read", Status, (c_char_p, c_char_p, POINTER(c_void_p))),
    # ucs_status_t ucp_config_modify(ucp_config_t *, const char *, const char *)
    Function("ucp_config_modify", Status, (_Handle, c_char_p, c_char_p)),
    # void ucp_config_release(ucp_config_t *)
    Function("ucp_config_release", None, (_Handle,)),
    # ucs_status_t ucp_init_version(unsigned, unsigned, const ucp_params_t *,
    #                               const ucp_config_t *, ucp_context_h *)
    Function(
        "ucp_init_version",
        Status,
        (c_uint, c_uint, POINTER(ContextParameters), _Handle, POINTER(c_void_p)),
    ),
    # void ucp_cleanup(ucp_context_h)
    Function("ucp_cleanup", None, (_Handle,)),
    # ucs_status_t ucp_worker_create(ucp_context_h, const ucp_worker_params_t *,
    #                                ucp_worker_h *)
    Function(
        "ucp_worker_create",
        Status,
        (_Handle, POINTER(WorkerParameters), POINTER(c_void_p)),
    ),
    # ucs_status_t ucp_worker_query(ucp_worker_h, ucp_worker_attr_t *)
    Function("ucp_worker_query", Status, (_Handle, POINTER(WorkerAttributes))),
    # void ucp_worker_release_address(ucp_worker_h, ucp_address_t *)
    Function("ucp_worker_release_address", None, (_Handle, _Address)),
    # void ucp_worker_destroy(ucp_worker_h)
    Function("ucp_worker_destroy", None, (_Handle,)),
    # ucs_status_t ucp_worker_get_efd(ucp_worker_h, int *)
    Function("ucp_worker_get_efd", Status, (_Handle, POINTER(c_int))),
    # ucs_status_t ucp_worker_arm(ucp_worker_h)
    Function("ucp_worker_arm", Status, (_Handle,)),
    # unsigned ucp_worker_progress(ucp_worker_h)
    Function("ucp_worker_progress", c_uint, (_Handle,), by_words=True),
    # ucs_status_ptr_t ucp_worker_flush_nbx(ucp_worker_h, const ucp_request_param_t *)
    Function("ucp_worker_flush_nbx", c_void_p, (_Handle, _Address)),
    # ucs_status_t ucp_ep_create(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *)
    Function(
        "ucp_ep_create",
        Status,
        (_Handle, POINTER(EndpointParameters), POINTER(c_void_p)),
    ),
    # ucs_status_t ucp_ep_query(ucp_ep_h, ucp_ep_attr_t *)
    Function("ucp_ep_query", Status, (_Handle, POINTER(EndpointAttributes))),
    # ucs_status_ptr_t ucp_tag_send_nbx(ucp_ep_h, const void *, size_t, ucp_tag_t,
    #                                   const ucp_request_param_t *)
    Function(
        "ucp_tag_send_nbx",
        c_void_p,
        (_Handle, _Address, c_size_t, c_uint64, _Address),
        short=True,
        by_words=True,
    ),
    # ucs_status_ptr_t ucp_tag_recv_nbx(ucp_worker_h, void *, size_t, ucp_tag_t tag,
    #                                   ucp_tag_t mask, const ucp_request_param_t *)
    Function(
        "ucp_tag_recv_nbx",
        c_void_p,
        (_Handle, _Address, c_size_t, c_uint64, c_uint64, _Address),
        short=True,
        by_words=True,
    ),
    # ucs_status_t ucp_request_check_status(void *)
    Function("ucp_request_check_status", Status, (_Handle,), short=True, by_words=True),
    # ucs_status_t ucp_tag_recv_request_test(void *, ucp_tag_recv_info_t *)
    Function(
        "ucp_tag_recv_request_test",
        Status,
        (_Handle, _Address),
        short=True,
        by_words=True,
    ),
    # void ucp_request_cancel(ucp_worker_h, void *)
    Function("ucp_request_cancel", None, (_Handle, _Handle)),
    # void ucp_request_free(void *)
    Function("ucp_request_free", None, (_Handle,), short=True, by_words=True),
)
