"""An expected error, without a test runner."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

__all__ = ["raises"]


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Fail with `AssertionError` unless the block raises `kind` matching `match`."""
    try:
        yield
    except kind as error:
        if not re.search(match, str(error)):
            raise AssertionError(
                f"{type(error).__name__} with the text {str(error)!r}; expected one "
                f"that matches {match!r}"
            ) from error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
