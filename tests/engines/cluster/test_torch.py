"""Ranks of torch where torch is missing, and the variables that torchrun sets."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from rankscope.engines import Cluster, ClusterStartError
from rankscope.engines.launch import preconditions
from rankscope.engines.observe.rank_slots import RankSlot, environment
from rankscope.engines.wire.gpu_environment import Gpus
from rankscope.engines.wire.ipyparallel_private import call_of
from rankscope.engines.wire.torch_environment import TorchOptions


@pytest.mark.processes
def test_a_missing_torch_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: None)
    steps: list[str] = []
    with pytest.raises(ClusterStartError) as caught:
        Cluster.start(2, torch=True, progress=steps.append)
    assert "pip install torch" in str(caught.value)
    assert sys.executable in str(caught.value)
    assert steps == []


@pytest.mark.processes
def test_a_torch_that_only_the_ranks_lack_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with engines on other hosts, whose Python is not this one."""
    monkeypatch.setattr(preconditions, "find_spec", lambda name: "there")
    monkeypatch.setattr(
        "rankscope.engines.cluster.torch_start.call_of",
        lambda *call: (
            f"__import__('sys').modules.update(torch=None) or {call_of(*call)}"
        ),
    )
    with pytest.raises(ClusterStartError) as caught:
        Cluster.start(1, torch=True)
    message = str(caught.value)
    assert message.startswith("importing torch: rank 0: ModuleNotFoundError")
    assert "pip install torch, on every host" in message


@pytest.mark.processes
def test_backend_is_for_groups_of_rankscope() -> None:
    with pytest.raises(ValueError, match=r"torch='gloo'"):
        Cluster.start(2, torch=True, backend="gloo")


def test_the_transport_of_torchs_ops_is_checked_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: "there")
    monkeypatch.setattr(preconditions, "has_driver", lambda: False)
    monkeypatch.setattr(preconditions, "why_unusable", lambda backend: None)
    steps: list[str] = []
    with pytest.raises(ClusterStartError, match="there is no GPU here"):
        Cluster.start(2, torch="rankscope", backend="cuda:nccl", progress=steps.append)
    assert steps == []


@pytest.mark.parametrize(
    ("torch", "backend"),
    [
        (True, ""),
        ("nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo, cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_backends(torch: bool | str, backend: str) -> None:
    options = TorchOptions.parse(torch)
    assert options is not None
    assert options.backend == backend


@pytest.mark.parametrize(
    ("torch", "over"),
    [
        ("rankscope", True),
        ("cpu:rankscope", True),
        ("cpu:gloo,cuda:nccl", False),
        (True, False),
    ],
)
def test_only_over_rankscope_its_default_group_has_a_backend(
    torch: bool | str, over: bool
) -> None:
    options = TorchOptions.parse(torch)
    assert options is not None
    assert options.over_rankscope == over
    if over:
        assert preconditions.torch_options(torch, "cpu:ucx") == options
    else:
        with pytest.raises(ValueError, match="--torch rankscope"):
            preconditions.torch_options(torch, "cpu:ucx")


def test_no_torch() -> None:
    assert TorchOptions.parse(False) is None


@pytest.mark.parametrize(
    "torch", ["", "GLOO", "cpu:gloo,cuda", "cpu:gloo,cpu:nccl", "a:b:c", "gloo,nccl"]
)
def test_texts_that_name_no_backends(torch: str) -> None:
    with pytest.raises(ValueError, match="expected a backend of torch") as caught:
        TorchOptions.parse(torch)
    assert repr(torch) in str(caught.value)


def test_the_variables_of_torchrun_on_two_hosts() -> None:
    first = RankSlot(0, 0, "", 1, "a", "10.0.0.1", 1234)
    slots = [
        first,
        replace(first, rank=1),
        replace(first, rank=2, host="b", address="10.0.0.2"),
    ]
    options = TorchOptions("gloo").of_run("run").restarted().restarted()
    env = environment(slots, Gpus(), options)
    groups = [(env[r]["GROUP_RANK"], env[r]["GROUP_WORLD_SIZE"]) for r in range(3)]
    assert groups == [("0", "2"), ("0", "2"), ("1", "2")]
    assert [env[r]["LOCAL_RANK"] for r in range(3)] == ["0", "1", "0"]
    assert [env[r]["ROLE_RANK"] for r in range(3)] == ["0", "1", "2"]
    for one in env.values():
        assert one["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert one["TORCHELASTIC_RUN_ID"] == "run"
        assert one["MASTER_ADDR"] == "10.0.0.1"
    assert "TORCHELASTIC_RUN_ID" not in environment(slots, Gpus())[0]
