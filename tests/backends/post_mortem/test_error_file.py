"""The error files of torchelastic: an exception, and a rank if the name has one."""

from __future__ import annotations

import json

import pytest

from rankscope.backends.post_mortem.evidence_file import RawFile, UnreadableError
from rankscope.backends.post_mortem.torchelastic import ErrorFileReader

STACK = """\
Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/distributed/elastic/x.py", line 3, in f
    return f()
  File "/job/data.py", line 77, in next_batch
    raise ValueError("batch 3 is empty")
ValueError: batch 3 is empty
"""


def error_file(path: str, message: object) -> RawFile:
    return RawFile(path, json.dumps({"message": message}).encode())


MESSAGE = {
    "message": "ValueError: batch 3 is empty",
    "extraInfo": {"py_callstack": STACK, "timestamp": "1764051129"},
}


def test_the_exception_of_a_rank() -> None:
    file = error_file("rank_5/error.json", MESSAGE)
    assert ErrorFileReader().recognises(file)
    (one,) = ErrorFileReader().read(file)
    assert (one.rank, one.exception) == (5, "ValueError: batch 3 is empty")
    assert str(one.exception_line) == "data.py:77"


def test_a_local_rank_is_no_rank() -> None:
    file = error_file("x_default/attempt_0/3/error.json", MESSAGE)
    with pytest.raises(UnreadableError, match=r"empty at data.py:77: it does not"):
        ErrorFileReader().read(file)


def test_who_gave_up_waiting_is_no_cause() -> None:
    text = "DistStoreError: wait timeout after 300000ms, keys: /default_pg/0"
    stack = STACK.replace("ValueError: batch 3 is empty", text)
    message = {"message": text, "extraInfo": {"py_callstack": stack}}
    (one,) = ErrorFileReader().read(error_file("rank_5.json", message))
    assert (one.exception, str(one.location)) == (None, "data.py:77")


@pytest.mark.parametrize("message", [None, 3, [], {}, {"message": 3}])
def test_a_message_that_makes_no_sense(message: object) -> None:
    with pytest.raises(UnreadableError):
        ErrorFileReader().read(error_file("rank_5.json", message))


@pytest.mark.parametrize("data", [b'{"message": ', b'{"message":' + b"[" * 100_000])
def test_json_that_was_cut(data: bytes) -> None:
    file = RawFile("rank_5.json", data)
    assert ErrorFileReader().recognises(file)
    with pytest.raises(UnreadableError, match="JSON cannot be read"):
        ErrorFileReader().read(file)


def test_a_message_without_a_traceback() -> None:
    (one,) = ErrorFileReader().read(error_file("rank_5.json", "out of memory"))
    assert (one.exception, one.exception_line) == ("out of memory", None)
