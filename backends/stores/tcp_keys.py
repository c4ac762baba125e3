"""The key that the ranks of a group share, and the CURVE keys derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ..descriptors import REMEDY, allow_descriptors
from ..errors import DistNetworkError
from ..install import pip_install
from ..routes import is_link_local

__all__ = [
    "GOODBYE",
    "MAX_MESSAGE",
    "CurveKeys",
    "curve_keys",
    "endpoint_of",
    "shared_key",
]


class CurveKeys(NamedTuple):
    """Z85-encoded CURVE keys of a store's server and of its clients."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def curve_keys(key: bytes) -> CurveKeys:
    """Derive the key pairs that server and clients of one store use from `key`.

    CURVE is used instead of frames with an HMAC and a nonce of our own, because
    CURVE is part of pyzmq, encrypts as well as authenticates, has per-connection
    keys that rule out replay and reflection, and rejects a peer without the key in
    libzmq's own thread, before any byte of that peer reaches Python. Both sides
    derive both pairs, so only holders of the shared key can be server or client.
    """
    if not key:
        raise ValueError("key: a store needs a non-empty key")
    if not zmq.has("curve"):
        raise DistNetworkError(
            "this pyzmq was built without CURVE, which the TCP store needs to keep "
            "strangers out: install pyzmq from a wheel "
            f"({pip_install('--force-reinstall', 'pyzmq')}), or use "
            "init_method='file:///path'"
        )

    def secret_of(side: bytes) -> bytes:
        # The label separates the two sides and later versions of the protocol.
        label = b"rankscope store v1 " + side
        return z85.encode(hmac.digest(key, label, hashlib.sha256))

    server, client = secret_of(b"server"), secret_of(b"client")
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def shared_key() -> bytes:
    """Return the key of ranks that were started without one.

    The key is the environment's ``RANKSCOPE_KEY``, or else a secret of this user
    in ``~/.rankscope/key`` (mode 0600, made at the first call), so that ranks of
    one user with one home directory connect without any setting. Raises
    `DistNetworkError` if that file is readable by others or cannot be made.
    """
    from_environment = os.environ.get("RANKSCOPE_KEY")
    if from_environment:
        return from_environment.encode()
    path = Path.home() / ".rankscope" / "key"
    try:
        return _read_secret(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _write_secret(path)
        return _read_secret(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> DistNetworkError:
    return DistNetworkError(
        f"cannot use {path} for the secret that ranks share ({error.strerror}): "
        "set RANKSCOPE_KEY to the same secret on every rank instead"
    )


def _read_secret(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & (
            stat.S_IRWXG | stat.S_IRWXO
        ):
            raise DistNetworkError(
                f"{path} holds the secret that ranks share and must belong to you "
                f"alone: run chmod 600 {path}, or set RANKSCOPE_KEY"
            )
        secret = file.read().strip()
    if len(secret) < 32:
        raise DistNetworkError(f"{path} holds no valid secret: delete it and retry")
    return secret


def _write_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode() + b"\n")
        # Ranks start at the same time: link() succeeds on exactly one of them and
        # never exposes a half-written file to the others, also over NFS.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


#: Largest message in bytes. A value of a rendezvous is an address or a few pickled
#: objects; the bound keeps a client with a bug from filling the memory of rank 0.
MAX_MESSAGE = 256 << 20

#: Status that the server sends, without a request, before an orderly end.
GOODBYE = b"goodbye"

#: File descriptors that a server or a client opens, with some to spare.
_DESCRIPTORS = 20


def zmq_context(host: str, port: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context for the store at `host`:`port`."""
    if not allow_descriptors(_DESCRIPTORS):
        raise DistNetworkError(
            f"the store at {host}:{port}: this process has no {_DESCRIPTORS} file "
            f"descriptors left: {REMEDY}"
        )
    return zmq.Context()


def endpoint_of(host: str, port: int) -> str:
    """Return the ZeroMQ endpoint of `host`, a name or an address of either family."""
    try:
        # One may name an interface that is not here.
        found = (
            []
            if is_link_local(host)
            else socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        raise DistNetworkError(
            f"the host name {host!r} cannot be resolved ({error.strerror}): "
            "check MASTER_ADDR"
        ) from error
    # The name of a host, as of mDNS, may have such an address beside others.
    found = [one for one in found if not is_link_local(str(one[4][0]))]
    if not found:
        raise DistNetworkError(
            f"{host}: a link-local address of IPv6 means something else on each host: "
            "name another address of rank 0's host as MASTER_ADDR"
        )
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, address = found[0][0], found[0][4][0]
    shown = f"[{address}]" if family == socket.AF_INET6 else address
    return f"tcp://{shown}:{port or '*'}"
