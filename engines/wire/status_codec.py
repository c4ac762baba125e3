"""Encode and decode a rank's summary.

The summary arrives from another process and may contain anything: every field is
checked here, once, against its type in `Summary`.
"""

from __future__ import annotations

import msgspec

from ..status import Summary

__all__ = ["decode", "encode"]

# A limit that is infinite is encoded as null.
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Summary)


def encode(summary: Summary) -> str:
    """Return a summary for the wire."""
    return _encoder.encode(summary).decode()


def decode(text: str | bytes) -> Summary:
    """Return the summary that `text` has.

    Raises `ValueError`, which names the field that is not what it should be.
    """
    return _decoder.decode(text)
