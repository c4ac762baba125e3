"""Connection: the messages between this rank and one other, over a socket.

A message of up to `EAGER` bytes is sent at once, and is kept by a receiver that has not
asked for it yet. So that this takes no more than `WINDOW` bytes of a receiver's memory
for each sender, the receiver reports what its receives have taken (CREDIT); of each
message `OVERHEAD` bytes are counted too. Larger
messages, and those for which the window has no room, are offered (OFFER): once a
receive asks for one, its rank reads it out of the sender's memory (TAKEN), or has it
sent (GRANT, DATA). The stream is read at all times, whatever is in front of it.
"""

from __future__ import annotations

import collections
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from ..errors import ConnectionLostError
from ..messaging.algorithms import Flat
from ..messaging.transport import Received, address_of
from .matching import Arrival, Matching, Request, TruncationError, as_bytes
from .peer_memory import PeerMemory

__all__ = ["EAGER", "OVERHEAD", "WINDOW", "Connection"]

#: Bytes of the largest message that is sent before its receive asks for it.
EAGER = 32 << 10
#: Bytes that one sender may have in a receiver's memory before they are asked for.
WINDOW = 4 << 20
#: Bytes of memory that a receiver needs for a message beside those of the message.
OVERHEAD = 512

# A frame: its kind above the tag with the signature, the bytes of the message, and the
# address (OFFER) or number (GRANT, DATA, TAKEN) of what was offered. Offers are counted
# on both sides. EAGER and DATA are followed by the message.
_FRAME = struct.Struct("<QQQ")
_KIND_SHIFT = 60
_TAG = (1 << _KIND_SHIFT) - 1
_EAGER, _OFFER, _GRANT, _DATA, _TAKEN, _CREDIT = range(6)
# The kinds that a message follows.
_MESSAGES = (_EAGER, _DATA)
_HEAD = _FRAME.size
_pack, _unpack = _FRAME.pack, _FRAME.unpack_from

# Bytes that are read at once while it is not known where they belong: many small
# messages in one call. Of a large one so many are copied once more.
_STAGING = 16 << 10
# Bytes after which the other connections get their turn.
_TURN = 4 << 20


class Connection:
    """The socket to rank `peer` of the group, and what is in flight on it.

    Every call is made under the lock of the queue. `sock` does not block; the socket of
    an encrypted connection may take less than it is given (`encryption`). `memory` is
    that of `peer`, if this rank may read it; `changed` is called when `wants_to_write`
    has become true, or `ended`.
    """

    def __init__(
        self,
        sock: Any,
        peer: int,
        matching: Matching,
        memory: PeerMemory | None,
        changed: Callable[[Connection], None],
    ) -> None:
        self.socket, self.peer, self.memory = sock, peer, memory
        #: Why nothing more can be sent; what the other rank has sent may still be read.
        self.lost: ConnectionLostError | None = None
        #: Reads of the other rank's memory that are not complete.
        self.reads: collections.deque[_Read] = collections.deque()
        self._matching, self._changed = matching, changed
        self._receive_into: Callable[..., int] = sock.recv_into
        self._send_some: Callable[..., int] = sock.sendmsg
        # What the socket has not taken yet: buffers, and the request that is over then.
        self._out: collections.deque[tuple[list[memoryview], Request | None]]
        self._out = collections.deque()
        self._unconsumed = self._consumed = 0
        # By number: what was offered, and the receives whose messages were asked for.
        self._offered: dict[int, Request] = {}
        self._granted: dict[int, Request] = {}
        self._offers_sent = self._offers_seen = 0
        self._staging = bytearray(_STAGING)
        self._staged = memoryview(self._staging)
        self._filled = 0
        # The rest of a message that has begun, and whose it is.
        self._rest: memoryview | None = None
        self._target: Request | Arrival | None = None
        # The bytes of the window that it has.
        self._charge = 0
        #: Whether everything that the other rank has sent was read.
        self.ended = False
        # A call over TLS returns one record, and more of them may be there.
        self._drains = getattr(sock, "kind", "") != "tls"
        if memory is not None:
            # A process that has ended, or has abandoned its ops, has hung up.
            self._hang_up = select.poll()
            self._hang_up.register(sock, select.POLLRDHUP)

    @property
    def wants_to_write(self) -> bool:
        """Whether the socket has not taken everything yet."""
        return bool(self._out)

    # -- sending -----------------------------------------------------------

    def send(self, array: Flat, tag: int) -> Request | None:
        """Send `array`; ``None``: it may change again."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)
        data = as_bytes(array)
        nbytes = data.nbytes
        if nbytes > EAGER or self._unconsumed + nbytes > WINDOW:
            return self._offer(data, tag)
        self._unconsumed += nbytes + OVERHEAD
        head = _pack(_EAGER << _KIND_SHIFT | tag, nbytes, 0)
        sent = 0
        if not self._out:
            # What follows is `_transmit` for the path of each small message.
            try:
                sent = self._send_some((head, data))
            except BlockingIOError:
                pass
            except OSError as error:
                self._refuse(error)
                raise self.lost from error  # type: ignore[misc]
            if sent == _HEAD + nbytes:
                return None
        request = Request(data, self)
        views = [memoryview(head)[sent:]] if sent < _HEAD else []
        self._transmit([*views, request.view[max(0, sent - _HEAD) :]], request)
        return request

    def _offer(self, data: Flat, tag: int) -> Request:
        request = Request(data, self)
        self._offered[self._offers_sent] = request
        self._offers_sent += 1
        address = address_of(data).value or 0
        self._control(_OFFER << _KIND_SHIFT | tag, data.nbytes, address)
        return request

    def _control(self, word: int, nbytes: int, number: int) -> None:
        self._transmit([memoryview(_pack(word, nbytes, number))], None)

    def _transmit(self, views: list[memoryview], request: Request | None) -> None:
        """Send `views`, after what the socket has not taken yet."""
        self._out.append((views, request))
        if len(self._out) == 1:
            self.flush()
            if self._out:
                self._changed(self)

    def flush(self) -> None:
        out = self._out
        try:
            while out:
                views, request = out[0]
                sent = self._send_some(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if views:
                    views[0] = views[0][sent:]
                    continue
                if request is not None:
                    request.end()
                out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._refuse(error)
        except BaseException as error:
            self._tear(error)
            raise

    def _refuse(self, error: OSError) -> None:
        """Send no more: the other rank reads no more.

        What it has sent before is still there, and is read up to its end.
        """
        said = error.strerror or str(error)
        self.lost = self.lost or ConnectionLostError(f"TCP: {said}", peer=self.peer)
        requests = [request for _, request in self._out if request is not None]
        self._out.clear()
        for request in requests:
            request.end(self.lost)

    def _tear(self, error: BaseException) -> None:
        """End the connection: an interrupt or a fault came in the midst of a frame."""
        what = type(error).__name__
        self.lose(ConnectionAbortedError(f"{what} in the midst of a message"))

    # -- receiving ---------------------------------------------------------

    def read(self) -> None:
        """Read what has come, up to a turn's worth."""
        turn = _TURN
        try:
            while turn > 0:
                rest = self._rest
                if rest is None:
                    filled = self._filled
                    space = self._staged[filled:] if filled else self._staged
                    count = self._receive_into(space)
                    if count:
                        self._filled = filled + count
                        self._parse()
                else:
                    space = rest
                    count = self._receive_into(rest)
                    self._rest = rest[count:]
                    if count == len(rest):
                        self._rest = None
                        self._complete()
                if not count:
                    self.lose(ConnectionResetError("it closed the connection"))
                    return
                if count < len(space) and self._drains:
                    return  # what comes later is read later
                turn -= count
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(error)
        except BaseException as error:
            self._tear(error)
            raise

    def _parse(self) -> None:
        """Take the frames out of what was read."""
        place, filled = 0, self._filled
        while filled - place >= _HEAD:
            word, nbytes, number = _unpack(self._staging, place)
            place += _HEAD
            kind, tag = word >> _KIND_SHIFT, word & _TAG
            if kind in _MESSAGES:
                if kind == _EAGER:
                    view = self._begin(tag, nbytes)
                else:
                    self._charge = 0
                    self._target = request = self._known(self._granted, number)
                    view = request.view[: request.nbytes]
                    if nbytes != request.nbytes:
                        raise _NoFrameError(f"{nbytes} bytes of {request.nbytes}")
                count = min(nbytes, filled - place)
                view[:count] = self._staged[place : place + count]
                place += count
                if count < nbytes:
                    self._rest = view[count:]
                else:
                    self._complete()
            elif kind == _OFFER:
                self._offer_came(tag, nbytes, number)
            elif kind == _CREDIT:
                self._unconsumed -= nbytes
            elif kind == _TAKEN:
                self._known(self._offered, number).end()
            elif kind == _GRANT:
                request = self._known(self._offered, number)
                head = _pack(_DATA << _KIND_SHIFT, len(request.view), number)
                if self.lost is None:
                    self._transmit([memoryview(head), request.view], request)
                else:
                    request.end(self.lost)
            else:
                raise _NoFrameError(f"kind {kind}")
        left = filled - place
        if left and place:
            self._staging[:left] = self._staging[place:filled]
        self._filled = left

    @staticmethod
    def _known(kept: dict[int, Request], number: int) -> Request:
        if number not in kept:
            raise _NoFrameError(f"number {number}")
        return kept.pop(number)

    def _begin(self, tag: int, nbytes: int) -> memoryview:
        """Return where an eager message goes."""
        if nbytes > EAGER:
            raise _NoFrameError(f"{nbytes} bytes at once")
        request, self._charge = self._matching.match(self.peer, tag), nbytes + OVERHEAD
        if request is not None and nbytes <= len(request.view):
            request.source, request.tag, request.nbytes = self.peer, tag, nbytes
            self._target = request
            view = request.view
            return view if len(view) == nbytes else view[:nbytes]
        self._target = arrival = Arrival(self.peer, tag, nbytes, None)
        if request is None:
            self._matching.keep(arrival)
        else:
            arrival.claimed = request
        return arrival.data

    def _complete(self) -> None:
        """End the message that is here as a whole."""
        target, self._target = self._target, None
        if isinstance(target, Request):
            self._consume(self._charge)
            target.done = True
        elif target is not None:
            target.whole = True
            if target.claimed is not None:
                self._fill(target.claimed, target)

    def _consume(self, nbytes: int) -> None:
        self._consumed += nbytes
        if self._consumed >= WINDOW // 4 and self.lost is None:
            consumed, self._consumed = self._consumed, 0
            self._control(_CREDIT << _KIND_SHIFT, consumed, 0)

    def claim(self, request: Request, arrival: Arrival) -> None:
        """Have `request` receive a message that came before it was posted."""
        if arrival.offer is not None:
            self._accept(request, arrival)
        elif arrival.whole:
            self._fill(request, arrival)
        else:
            arrival.claimed = request

    def _fill(self, request: Request, arrival: Arrival) -> None:
        self._consume(arrival.nbytes + OVERHEAD)
        if self._note(request, arrival):
            request.view[: arrival.nbytes] = arrival.data
            request.done = True

    def _note(self, request: Request, arrival: Arrival) -> bool:
        """Note what `request` receives; ``False``: it is too long for it."""
        source, tag, nbytes = arrival.source, arrival.tag, arrival.nbytes
        if nbytes > len(request.view):
            request.end(TruncationError(Received(source, nbytes, tag)))
            return False
        request.source, request.tag, request.nbytes = source, tag, nbytes
        return True

    # -- offers ------------------------------------------------------------

    def _offer_came(self, tag: int, nbytes: int, address: int) -> None:
        arrival = Arrival(self.peer, tag, nbytes, (self._offers_seen, address))
        self._offers_seen += 1
        request = self._matching.match(self.peer, tag)
        if request is None:
            self._matching.keep(arrival)
        else:
            self._accept(request, arrival)

    def _accept(self, request: Request, arrival: Arrival) -> None:
        assert arrival.offer is not None
        number, address = arrival.offer
        if self.lost is not None:
            request.end(self.lost)
        elif self._note(request, arrival):
            request.connection = self
            if self.memory is None or not arrival.nbytes:
                self._granted[number] = request
                self._control(_GRANT << _KIND_SHIFT, 0, number)
            else:
                self.reads.append(_Read(request, number, address))

    def read_memory(self) -> None:
        """Copy a piece of what is read from the other rank's memory."""
        read = self.reads[0]
        request, memory = read.request, self.memory
        own = (address_of(request.array).value or 0) + read.done
        left = request.nbytes - read.done
        try:
            if memory is not None:
                read.done += memory.read(own, read.address + read.done, left)
        except OSError:
            # It is forbidden by now, the array is a device's, or the other rank has
            # ended, which the socket tells: let the bytes come over that.
            self.memory = memory = None
        except BaseException as error:
            self._tear(error)
            raise
        if memory is None:
            self.reads.popleft()
            self._granted[read.number] = request
            self._control(_GRANT << _KIND_SHIFT, 0, read.number)
            return
        if read.done < request.nbytes:
            return
        # A rank that has abandoned its op may have written to the array meanwhile; it
        # hangs up before.
        if self._hang_up.poll(0):
            self.lose(ConnectionResetError("it closed the connection"))
            return
        self.reads.popleft()
        request.done = True
        self._control(_TAKEN << _KIND_SHIFT, 0, read.number)

    # -- the end -----------------------------------------------------------

    def lose(self, error: OSError) -> None:
        """End what is in flight with the other rank: nothing more will come."""
        if self.ended:
            return
        self.ended = True
        self._refuse(error)
        requests = [*self._offered.values(), *self._granted.values()]
        requests += [read.request for read in self.reads]
        target = self._target
        if isinstance(target, Arrival):
            target = target.claimed
        if target is not None:
            requests.append(target)
        self._offered.clear()
        self._granted.clear()
        self.reads.clear()
        self._target = self._rest = None
        for request in requests:
            request.end(self.lost)
        self._changed(self)
        self.hang_up()

    def hang_up(self) -> None:
        """Tell the other rank that this one has abandoned its ops; close the socket."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other rank has closed it
        self.close()

    def close(self) -> None:
        self.socket.close()


class _NoFrameError(ConnectionAbortedError):
    """The other rank has sent what is no frame."""

    def __init__(self, what: str) -> None:
        super().__init__(f"it sent what is no frame ({what})")


class _Read:
    """A read of the sender's memory: how many bytes are `done`."""

    __slots__ = ("address", "done", "number", "request")

    def __init__(self, request: Request, number: int, address: int) -> None:
        self.request, self.number, self.address = request, number, address
        self.done = 0
