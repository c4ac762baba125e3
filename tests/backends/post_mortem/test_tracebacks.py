"""Exceptions that are consequences of a hang, and exceptions that are its cause."""

from __future__ import annotations

import pytest

from rankscope.backends.post_mortem.tracebacks import Raised, raised_in

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
STORE = "torch.distributed.DistStoreError: "
CONSEQUENCES = (
    f"{GLOO}Connection closed by peer [127.0.0.1]:401",
    f"{GLOO}Timed out waiting 4000ms for send operation to complete",
    f"{STORE}wait timeout after 6000ms, keys: /default_pg/0//cpu//0/2",
    f"{STORE}Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 6000 ms",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 2.",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was "
    "reset",
    "torch.distributed.DistNetworkError: The client socket has timed out after 25000ms "
    "while trying to connect to (127.0.0.1, 29877).",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was "
    "likely closed. Did the remote server shutdown or crash?",
    "RuntimeError: Socket Timeout",
    "lightning.fabric.utilities.exceptions.SIGTERMException",
    "KeyboardInterrupt",
)
CAUSES = (
    "ValueError: batch 3 is empty",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.distributed.DistBackendError: NCCL error in: Duplicate GPU detected",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
    "local network address. EADDRINUSE",
)


@pytest.mark.parametrize("text", CONSEQUENCES)
def test_a_consequence(text: str) -> None:
    assert Raised(text, ()).is_consequence


@pytest.mark.parametrize("text", CAUSES)
def test_a_cause(text: str) -> None:
    assert not Raised(text, ()).is_consequence


def test_the_rank_of_a_key() -> None:
    assert Raised(CONSEQUENCES[2], ()).awaited == 2
    for another in "tp/0/", "default_pg/1/":
        text = CONSEQUENCES[2].replace("default_pg/0/", another)
        assert Raised(text, ()).awaited is None


@pytest.mark.parametrize(
    ("key", "group", "awaited"), [("0", 0, 0), ("0", 1, None), ("0:1", 0, None)]
)
def test_the_rank_that_makes_the_id_of_nccl_in_the_group_of_all(
    key: str, group: int, awaited: int | None
) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 12, in <module>',
        "torch.distributed.DistBackendError: [7] is setting up NCCL communicator and "
        f"retrieving ncclUniqueId from [0] via c10d key-value store by key '{key}', "
        f"but store->get('{key}') got error: wait timeout after 600000ms, keys: "
        f"/default_pg/{group}//cuda//{key}",
    )
    raised = raised_in(lines)
    assert raised is not None
    assert raised.is_consequence
    assert raised.awaited == awaited


def test_the_last_of_a_chain_has_left_the_program() -> None:
    text = """\
Traceback (most recent call last):
  File "/job/data.py", line 7, in load
    return cache[name]
KeyError: 'shard 3'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 120, in <module>
    main()
  File "/job/data.py", line 9, in load
    raise RuntimeError("no shard 3") from None
RuntimeError: no shard 3
with a second line
"""
    raised = raised_in(text.splitlines())
    assert raised is not None
    assert raised.text == "RuntimeError: no shard 3"
    assert [one.line for one in raised.frames] == [9, 120]
    assert raised.frames[-1].outermost
