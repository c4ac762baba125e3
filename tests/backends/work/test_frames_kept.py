"""Who looks where threads are keeps nothing of what they have in their functions."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from rankscope.backends.groups.inquiry import main_thread_place
from rankscope.backends.torch_watch.frames import waiting_frames


class Held:
    """What a thread has in a function."""


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "look", [main_thread_place, lambda: waiting_frames(None)], ids=["cells", "torch"]
)
def test_what_a_thread_had_is_gone_with_its_function(
    look: Callable[[], object],
) -> None:
    begun, over = threading.Event(), threading.Event()
    made: list[weakref.ref[Held]] = []

    def hold() -> None:
        held = Held()
        made.append(weakref.ref(held))
        begun.set()
        over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    # On another thread, as while the main one waits.
    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    over.set()
    thread.join()
    assert made[0]() is None
