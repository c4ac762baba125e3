"""Pickles as plain data: no class is looked up, so that nothing of a file is run."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from .evidence_file import UnreadableError

__all__ = ["load_plain"]


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        name = f"{module_name}.{global_name}"
        raise UnreadableError(f"refused: it asks for {name!r}, a dump holds plain data")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UnreadableError("refused: it refers to objects outside of the file")


def load_plain(data: bytes) -> Any:
    """Return the dicts, lists, tuples, numbers and texts that a pickle holds.

    Raises `UnreadableError` for whatever else it holds, and where it is damaged.
    """
    try:
        # A BytesIO alone cannot look ahead: it is asked for each opcode by itself.
        return _Plain(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except UnreadableError:
        raise
    except MemoryError:
        raise UnreadableError(
            "damaged: it asks for more memory than there is"
        ) from None
    # A damaged pickle raises nearly anything: of its opcodes, its memo, its texts.
    except Exception as error:
        what = str(error) or type(error).__name__
        raise UnreadableError(f"damaged: {what}") from error
