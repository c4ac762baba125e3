"""The keys of a script's job: of its channel, and of what its ranks sign."""

from __future__ import annotations

import hashlib
import hmac
import os

from rankscope.backends.stores.tcp_keys import shared_key

__all__ = ["channel_key", "key_of_environment", "sign", "verifies"]


def channel_key(nonce: str) -> str:
    """Return the key of the channel of the job with `nonce`, in hexadecimal.

    All ranks of one user derive it without communication. It lets its holder into this
    job only: the secret of the user (`tcp_keys.shared_key`) cannot be found from it.
    """
    return _derive(b"channel", nonce)


def key_of_environment() -> str | None:
    """Return the channel's key where ``RANKSCOPE_KEY`` is set: it has no nonce then."""
    return channel_key("") if os.environ.get("RANKSCOPE_KEY") else None


def sign(nonce: str, message: bytes) -> str:
    """Return the signature of a rank's message to the other ranks.

    A notebook with the channel's key can see such a message, and not make one.
    """
    secret = bytes.fromhex(_derive(b"ranks", nonce))
    return hmac.digest(secret, message, hashlib.sha256).hex()


def verifies(nonce: str, message: bytes, signature: str) -> bool:
    return hmac.compare_digest(sign(nonce, message), signature)


def _derive(label: bytes, nonce: str) -> str:
    text = b"rankscope job v1 " + label + b" " + nonce.encode()
    return hmac.digest(shared_key(), text, hashlib.sha256).hex()
