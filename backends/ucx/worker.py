"""Worker: one UCX worker with its endpoints, and the requests on it.

Nothing here is called back by UCX. A callback into Python would have to take the GIL
in the middle of a C call, and could run while the interpreter ends; so requests are
tested.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DistBackendError
from ..messaging.transport import address_of
from . import ucp
from .library import ERROR_FROM, UCXError, load

__all__ = ["Request", "TruncationError", "Worker"]

_C = ucp.CONSTANTS
_BUSY, _IN_PROGRESS = _C["UCS_ERR_BUSY"], _C["UCS_INPROGRESS"]
_TRUNCATED = _C["UCS_ERR_MESSAGE_TRUNCATED"]

# The receiver copies what is large, out of the sender's memory: put by the sender, it
# would be written to the arrays of a receiver that has aborted. And a connect() to a
# host that does not answer must not block. The environment does not change these.
_CONFIG = {"RNDV_SCHEME": "get_zcopy", "TCP_CONN_NB": "y"}

# Seconds that `settle` takes at most, in which some 20 GB are copied, and the turns in
# which nothing moves that end it.
_SETTLE_SECONDS = 5.0
_QUIET_TURNS = 3

# Before a receive of up to so many bytes the worker is advanced: with the message there
# no request is needed, whose cost is larger than that of one more copy.
_SMALL = 4096

# An endpoint uses a handful of transports.
_MOST_TRANSPORTS = 16

_word = ucp.word


class TruncationError(UCXError):
    """A message was longer than the array that was to receive it."""

    def __init__(self, explanation: str, tag: int, nbytes: int) -> None:
        super().__init__("a receive", _TRUNCATED, explanation)
        #: Of the message.
        self.tag, self.nbytes = tag, nbytes


@dataclass(slots=True, eq=False)
class Request:
    """A message in flight: UCX's request, and what has come where it is a receive."""

    #: UCX's request; ``None`` once it is over: UCX may use it for another message.
    pointer: Any
    is_receive: bool
    #: Tag and bytes of what was received, once it was.
    tag: int = 0
    nbytes: int = 0
    #: The rank, in the group, that a message is sent to.
    peer: int | None = None


class Worker:
    """A context of UCX and one worker of it, for one group.

    A context of its own reads ``UCX_TLS`` and the other variables anew for each group,
    and costs a millisecond. Not thread-safe but for `arm`. The number of `peers` is a
    hint for UCX; the `settings` are without ``UCX_`` before the name.
    """

    def __init__(self, peers: int, settings: dict[str, str] | None = None) -> None:
        self._library = library = load()
        # As `ucp.word` made them, as are all arguments below.
        self._endpoints: dict[int, Any] = {}
        self._addresses: Sequence[bytes] = ()
        self._context = self._handle = 0
        #: Set where `test` or `receive` has advanced anything.
        self.moved = False
        self._info = ucp.ReceiveInfo()
        self._info_address = _word(ctypes.addressof(self._info))
        host = _C["UCS_MEMORY_TYPE_HOST"]
        # Host memory, so that UCX does not look up what kind each array is.
        send = ucp.RequestParameters(
            op_attr_mask=_C["UCP_OP_ATTR_FIELD_MEMORY_TYPE"], memory_type=host
        )
        # What is there already is received at once, and its length is written here.
        receive = ucp.RequestParameters(
            op_attr_mask=_C["UCP_OP_ATTR_FIELD_MEMORY_TYPE"]
            | _C["UCP_OP_ATTR_FIELD_RECV_INFO"],
            memory_type=host,
            recv_info=ctypes.addressof(self._info),
        )
        self._keep = (send, receive)
        self._send_parameters = _word(ctypes.addressof(send))
        self._receive_parameters = _word(ctypes.addressof(receive))
        # An attribute of an instance costs less than a look-up in the library.
        self._tag_send = library.ucp_tag_send_nbx
        self._tag_receive = library.ucp_tag_recv_nbx
        self._check_status = library.ucp_request_check_status
        self._receive_test = library.ucp_tag_recv_request_test
        self._free = library.ucp_request_free
        self._progress = library.ucp_worker_progress
        try:
            self._context = self._make_context(peers, settings or {})
            self._handle = self._make_worker()
            self._worker = _word(self._handle)
            self.address = self._read_address()
            self.descriptor = self._event_descriptor()
        except BaseException:
            self.destroy()
            raise

    # -- making it ---------------------------------------------------------

    def _make_context(self, peers: int, settings: dict[str, str]) -> int:
        library = self._library
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        status = library.ucp_config_read(None, None, ctypes.byref(config))
        library.check("ucp_config_read", status)
        try:
            for name, value in {**settings, **_CONFIG}.items():
                status = library.ucp_config_modify(
                    config, name.encode(), value.encode()
                )
                library.check(f"ucp_config_modify(UCX_{name}={value})", status)
            parameters = ucp.ContextParameters(
                field_mask=_C["UCP_PARAM_FIELD_FEATURES"]
                | _C["UCP_PARAM_FIELD_ESTIMATED_NUM_EPS"],
                features=_C["UCP_FEATURE_TAG"] | _C["UCP_FEATURE_WAKEUP"],
                estimated_num_eps=peers,
            )
            status = library.ucp_init_version(
                _C["UCP_API_MAJOR"],
                1,
                ctypes.byref(parameters),
                config,
                ctypes.byref(context),
            )
            library.check("ucp_init", status)
        finally:
            library.ucp_config_release(config)
        return context.value or 0

    def _make_worker(self) -> int:
        library, worker = self._library, ctypes.c_void_p()
        parameters = ucp.WorkerParameters(
            field_mask=_C["UCP_WORKER_PARAM_FIELD_THREAD_MODE"]
            | _C["UCP_WORKER_PARAM_FIELD_FLAGS"],
            thread_mode=_C["UCS_THREAD_MODE_MULTI"],
            # An abort leaves requests behind.
            flags=_C["UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK"],
        )
        status = library.ucp_worker_create(
            self._context, ctypes.byref(parameters), ctypes.byref(worker)
        )
        library.check("ucp_worker_create", status)
        return worker.value or 0

    def _read_address(self) -> bytes:
        library = self._library
        attributes = ucp.WorkerAttributes(
            field_mask=_C["UCP_WORKER_ATTR_FIELD_ADDRESS"]
            | _C["UCP_WORKER_ATTR_FIELD_THREAD_MODE"]
        )
        status = library.ucp_worker_query(self._handle, ctypes.byref(attributes))
        library.check("ucp_worker_query", status)
        address = ctypes.string_at(attributes.address, attributes.address_length)
        library.ucp_worker_release_address(self._handle, attributes.address)
        if attributes.thread_mode != _C["UCS_THREAD_MODE_MULTI"]:
            raise DistBackendError(
                f"the ucx backend cannot be used: UCX in {library.path} was built "
                "without --enable-mt, and two threads may not use it"
            )
        return address

    def _event_descriptor(self) -> int:
        descriptor = ctypes.c_int()
        status = self._library.ucp_worker_get_efd(
            self._handle, ctypes.byref(descriptor)
        )
        self._library.check("ucp_worker_get_efd", status)
        return descriptor.value

    # -- peers ---------------------------------------------------------------

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Take the addresses of all ranks; an endpoint is made at the first send."""
        self._addresses = addresses

    def _connect_to(self, peer: int) -> Any:
        library, endpoint = self._library, ctypes.c_void_p()
        address = ctypes.create_string_buffer(self._addresses[peer])
        parameters = ucp.EndpointParameters(
            field_mask=_C["UCP_EP_PARAM_FIELD_REMOTE_ADDRESS"],
            address=ctypes.addressof(address),
        )
        status = library.ucp_ep_create(
            self._handle, ctypes.byref(parameters), ctypes.byref(endpoint)
        )
        library.check("ucp_ep_create", status, peer)
        self._endpoints[peer] = _word(endpoint.value)
        return self._endpoints[peer]

    @property
    def connected(self) -> int:
        """The number of peers that were sent to."""
        return len(self._endpoints)

    def transports(self) -> dict[int, tuple[str, ...]]:
        """Return the transports to each peer that was sent to: ``("tcp on eth0",)``.

        In UCX's order; 10 µs for a peer.
        """
        return {peer: self._query(peer) for peer in list(self._endpoints)}

    def _query(self, peer: int) -> tuple[str, ...]:
        entries = (ucp.TransportEntry * _MOST_TRANSPORTS)()
        attributes = ucp.EndpointAttributes(
            field_mask=_C["UCP_EP_ATTR_FIELD_TRANSPORTS"]
        )
        attributes.transports.entries = entries
        attributes.transports.num_entries = len(entries)
        attributes.transports.entry_size = ctypes.sizeof(ucp.TransportEntry)
        status = self._library.ucp_ep_query(
            self._endpoints[peer], ctypes.byref(attributes)
        )
        self._library.check("ucp_ep_query", status, peer)
        names = []
        for entry in entries[: attributes.transports.num_entries]:
            name, device = entry.transport_name.decode(), entry.device_name.decode()
            names.append(name if device == "memory" else f"{name} on {device}")
        return tuple(dict.fromkeys(names))

    # -- messages ------------------------------------------------------------

    def send(self, array: Any, peer: int, tag: int) -> Request | None:
        """Send the contiguous `array`; ``None``: UCX no longer needs it."""
        endpoint = self._endpoints.get(peer) or self._connect_to(peer)
        pointer = self._tag_send(
            endpoint,
            address_of(array),
            _word(array.nbytes),
            _word(tag),
            self._send_parameters,
        )
        if pointer is None:
            return None
        if pointer >= ERROR_FROM:
            self._library.refuse("ucp_tag_send", pointer, peer)
        return Request(_word(pointer), False, peer=peer)

    def receive(self, array: Any, tag: int, mask: int) -> Request:
        """Receive into the contiguous `array` what is sent with `tag`, as to `mask`.

        The request is over if the message was there. Of one that was there and is
        longer UCX reports nothing: a `UCXError`.
        """
        nbytes = array.nbytes
        if nbytes <= _SMALL and self._progress(self._worker):
            self.moved = True
        pointer = self._tag_receive(
            self._worker,
            address_of(array),
            _word(nbytes),
            _word(tag),
            _word(mask),
            self._receive_parameters,
        )
        if pointer is None:
            info = self._info
            return Request(None, True, info.sender_tag, info.length)
        if pointer >= ERROR_FROM:
            self._library.refuse("ucp_tag_recv", pointer)
        return Request(_word(pointer), True)

    def progress(self) -> bool:
        """Advance everything once; return whether anything was done."""
        return self._progress(self._worker) != 0

    def test(self, request: Request, looks: int = 1) -> bool:
        """Advance everything up to `looks` times; return whether `request` is over."""
        pointer = request.pointer
        if pointer is None:
            return True
        progress, worker = self._progress, self._worker
        is_receive, info = request.is_receive, self._info_address
        for _ in range(looks):
            if progress(worker):
                self.moved = True
            if is_receive:
                status = self._receive_test(pointer, info)
            else:
                status = self._check_status(pointer)
            if status != _IN_PROGRESS:
                break
        else:
            return False
        if is_receive:
            request.tag, request.nbytes = self._info.sender_tag, self._info.length
        # Forgotten first: an interrupt here leaks a request until the worker ends,
        # and the other way round it would have one freed twice.
        request.pointer = None
        self._free(pointer)
        if status:
            explanation = self._library.explain(status)
            if status == _TRUNCATED and is_receive:
                raise TruncationError(explanation, request.tag, request.nbytes)
            call = "a receive" if is_receive else "a send"
            raise UCXError(call, status, explanation, request.peer)
        return True

    def arm(self) -> bool:
        """Have `descriptor` become readable at the next event.

        ``False``: there is something to do now. While a send waits for a peer that
        takes nothing out of a full queue, that is so all the time.
        """
        status = self._library.ucp_worker_arm(self._handle)
        if status == _BUSY:
            return False
        self._library.check("ucp_worker_arm", status)
        return True

    def flush(self) -> Request | None:
        """Start to send what UCX still holds of sends that are over."""
        pointer = self._library.ucp_worker_flush_nbx(
            self._handle, self._send_parameters
        )
        if pointer is None:
            return None
        if pointer >= ERROR_FROM:
            self._library.refuse("ucp_worker_flush", pointer)
        return Request(_word(pointer), False)

    # -- the end -------------------------------------------------------------

    def settle(self, receives: Sequence[Request]) -> bool:
        """Cancel `receives`; return whether the worker may be destroyed.

        One that is being copied out of the sender's memory is copied to its end, at
        some 250 ms for a GiB: UCX ends the process (an assertion in its arbiter.c) if
        its worker is destroyed meanwhile. One that waits for a message, or for a peer
        to send more of it, is left to `destroy`.
        """
        for request in receives:
            if request.pointer is not None:
                self._library.ucp_request_cancel(self._handle, request.pointer)
        deadline, quiet = time.monotonic() + _SETTLE_SECONDS, 0
        # Every turn copies a piece of it.
        while quiet < _QUIET_TURNS and time.monotonic() < deadline:
            quiet = 0 if self.progress() else quiet + 1
        return quiet >= _QUIET_TURNS

    def destroy(self) -> None:
        """End everything at once; waits for no peer.

        Nothing is written to an array afterwards, as receiving is done by this
        worker. To close an endpoint instead waits for its peer, which may be stopped.
        """
        handle, self._handle = self._handle, 0
        context, self._context = self._context, 0
        self._endpoints.clear()
        if handle:
            self._library.ucp_worker_destroy(handle)
        if context:
            self._library.ucp_cleanup(context)
