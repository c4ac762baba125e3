"""Quantities as text: three significant digits and the unit."""

from __future__ import annotations

import math

__all__ = ["bandwidth_text", "bytes_text", "duration_text", "elapsed_text"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def _digits(value: float) -> str:
    """Return `value`, below 1000, with three digits: ``1.23``, ``12.3``, ``123``."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def bytes_text(size: int) -> str:
    """``4 B``, ``1.5 MiB``, ``64 MiB``: powers of two come out even."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    if value == int(value):
        return f"{int(value)} {_BINARY[unit]}"
    return f"{_digits(value)} {_BINARY[unit]}"


def duration_text(seconds: float) -> str:
    """How long an op took: ``87.0 µs``, ``1.23 ms``, ``2.50 s``, ``3.2 min``."""
    if seconds < 0.9995e-3:
        return f"{_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 99.95:
        return f"{_digits(seconds)} s"
    return f"{seconds / 60:.1f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def elapsed_text(seconds: float) -> str:
    """The time since a start, while it is read: ``4.2 s``, ``37 s``, ``12 min``."""
    if seconds < 10:
        # Rounded down, as a clock shows time.
        return f"{math.floor(max(0.0, seconds) * 10) / 10:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bandwidth_text(gigabytes: float) -> str:
    """``12.3 GB/s``, ``40.0 MB/s``, ``1.20 kB/s``; nothing where there is none."""
    if gigabytes <= 0:
        return ""
    if gigabytes < 0.9995e-3:
        return f"{_digits(gigabytes * 1e6)} kB/s"
    if gigabytes < 0.9995:
        return f"{_digits(gigabytes * 1e3)} MB/s"
    return f"{_digits(gigabytes)} GB/s"
