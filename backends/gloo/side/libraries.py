"""The gloo libraries that the side process can use, by name."""

from __future__ import annotations

from .abi import Gloo
from .pygloo_abi import Pygloo
from .xoscar_abi import Xoscar

__all__ = ["LIBRARIES"]

#: The first one that is installed is the default.
LIBRARIES: dict[str, type[Gloo]] = {each.library: each for each in (Pygloo, Xoscar)}
