"""The traceback of a cell whose op was aborted ends at the user's line."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from rankscope.backends.errors import (
    ConnectionLostError,
    DistAbortedError,
    DistError,
)
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
    shown = traceback.extract_tb(_users_part(error)[1])
    assert [one.name for one in whole] == ["raised", "wait"]
    assert [one.name for one in shown] == ["raised"]
    assert shown[0].lineno == whole[0].lineno


def test_another_error_shows_all() -> None:
    error = raised(DistError("wrong"))
    assert _users_part(error) == (error, error.__traceback__)


def test_an_abort_shows_what_the_user_handled_but_no_lost_connection() -> None:
    """IPython reads the package's files for a cause: 60 ms on each rank."""
    error, users = DistAbortedError("aborted", op="send", culprits=[1]), KeyError()
    error.__context__ = users
    shown, _ = _users_part(error)
    assert shown.__context__ is users
    assert not shown.__suppress_context__
    error.__cause__ = ConnectionLostError("closed by peer")
    shown, _ = _users_part(error)
    assert isinstance(shown, DistAbortedError)
    assert shown.attributes() == error.attributes()
    assert str(shown) == str(error)
    assert shown.__cause__ is None
    assert shown.__suppress_context__
    assert error.__cause__ is not None
