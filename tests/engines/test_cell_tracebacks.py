"""The traceback of a cell whose op was aborted ends at the user's line."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from rankscope.backends.errors import DistAbortedError, DistError
from rankscope.engines.agent.cells import _users_part


def raised(error: DistError) -> DistError:
    """Return `error` after it has left a function of the package."""
    inside: dict[str, Any] = {"__name__": "rankscope.backends.some", "error": error}
    exec("def wait():\n    raise error", inside)
    with pytest.raises(DistError) as caught:
        inside["wait"]()
    return caught.value


def test_an_abort_shows_no_frame_of_the_package() -> None:
    error = raised(DistAbortedError("aborted"))
    whole = traceback.extract_tb(error.__traceback__)
    shown = traceback.extract_tb(_users_part(error))
    assert [one.name for one in whole] == ["raised", "wait"]
    assert [one.name for one in shown] == ["raised"]
    assert shown[0].lineno == whole[0].lineno


def test_another_error_shows_all() -> None:
    error = raised(DistError("wrong"))
    assert _users_part(error) is error.__traceback__
