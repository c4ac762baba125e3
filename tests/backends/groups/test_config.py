"""BackendConfig: the grammar, the defaults, and what breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.backends import (
    Backend,
    BackendConfig,
    DistBackendError,
    register_staging,
    unavailable_reason,
)
from rankscope.backends.interface import staging
from rankscope.backends.interface.registry import resolve


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp", {"cpu": "tcp"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:tcp", {"cpu": "tcp"}),
        ("cpu:tcp,cuda:nccl", {"cpu": "tcp", "cuda": "nccl"}),
        ("cuda:tcp , cpu:mpi", {"cuda": "tcp", "cpu": "mpi"}),
        ("ext:mpi", {"ext": "mpi"}),
        ("TCP", {"cpu": "tcp"}),
        ("CPU:Tcp,cuda:NCCL", {"cpu": "tcp", "cuda": "nccl"}),
        ("metal:tcp", {"metal": "tcp"}),
        ("dlpack77:tcp", {"dlpack77": "tcp"}),
    ],
)
def test_what_the_grammar_accepts(text: str, expected: dict[str, str]) -> None:
    config = BackendConfig(text)
    assert config.get_device_backend_map() == expected
    assert BackendConfig(str(config)) == config
    assert hash(BackendConfig(str(config))) == hash(config)
    assert str(config) in repr(config)


@pytest.mark.parametrize("text", [None, ""])
def test_the_default_is_tcp_whatever_else_is_there(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are used where they are named."""
    for name in ("gloo", "mpi", "ucx"):
        there = replace(resolve(name), unavailable=lambda: None)
        monkeypatch.setitem(Backend.registry, name, there)
    assert BackendConfig(text).device_backend_map["cpu"] == "tcp"
    assert unavailable_reason("tcp") is unavailable_reason("TCP") is None


@pytest.mark.parametrize(
    ("text", "offending"),
    [
        ("cpu:", "'cpu:'"),
        (":tcp", "':tcp'"),
        ("cpu:tcp,", "''"),
        (",cpu:tcp", "''"),
        ("cpu:tcp,,cuda:nccl", "''"),
        ("cpu:tcp:nccl", "'cpu:tcp:nccl'"),
        ("cpu:tcp,nccl", "'nccl'"),
        ("cpu:tcp,cpu:mpi", "'cpu' is given twice"),
        ("cpu:fancy", "'fancy'"),
        ("fancy", "'fancy'"),
        ("c pu:tcp", "'c pu'"),
        ("tcp,mpi", "tcp,mpi"),
    ],
)
def test_what_breaks_the_grammar_is_named(text: str, offending: str) -> None:
    with pytest.raises(ValueError, match="expected a backend") as caught:
        BackendConfig(text)
    assert offending in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("cpu:nccl", "cpu:nccl"),
        ("cpu:tcp,gpu:nccl", "gpu:nccl"),
        ("cpu:tcp, xpu : nccl", "xpu : nccl"),
    ],
)
def test_a_backend_for_what_it_cannot_serve_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="bad part") as caught:
        BackendConfig(text)
    assert f"bad part {part!r}" in str(caught.value)
    assert "nccl works on cuda arrays only: write cuda:nccl" in str(caught.value)


def test_a_registered_backend_serves_what_it_is_registered_for() -> None:
    for devices in (["cuda", "ext"], ["npu"]):
        Backend.register_backend("there", lambda *_: Backend(0, 1), devices=devices)
        try:
            for device in devices:
                BackendConfig(f"{device}:there")
            write = " or ".join(f"{device}:there" for device in devices)
            with pytest.raises(ValueError, match=f"only: write {write}"):
                BackendConfig("cpu:there")
        finally:
            del Backend.registry["there"]


@pytest.mark.parametrize(
    ("device", "meant"),
    [
        ("gpu", "cuda"),
        ("cdua", "cuda"),
        ("mps", "metal"),
        ("nothing", None),
    ],
)
def test_a_device_type_that_no_array_has_is_refused(
    device: str, meant: str | None
) -> None:
    with pytest.raises(ValueError, match=f"no array is of device type '{device}'") as e:
        BackendConfig(f"cpu:mpi,{device}:tcp")
    told = f"; did you mean {meant}?"
    assert str(e.value).endswith(told if meant else "each device once")


def test_a_device_type_that_staging_was_registered_for_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_copies", {})
    with pytest.raises(ValueError, match="no array is of device type 'card'"):
        BackendConfig("card:tcp")
    register_staging("card", np.array, np.copyto)
    assert str(BackendConfig("card:tcp")) == "card:tcp"


def test_what_cannot_be_staged_is_not_told_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_copies", {})
    with pytest.raises(
        DistBackendError, match=r"no function that copies .* register_staging"
    ):
        staging.staging_for("metal", "mpi")
    Backend.register_backend("there", lambda *_: Backend(0, 1), devices="cuda")
    try:
        with pytest.raises(
            DistBackendError, match="^there works on cuda arrays only: write cuda:there"
        ):
            staging.staging_for("metal", "there")
    finally:
        del Backend.registry["there"]


@pytest.mark.parametrize("name", ["ncll", "nccl2"])
def test_a_misspelt_backend_is_guessed(name: str) -> None:
    with pytest.raises(ValueError, match="unknown backend .*; did you mean nccl") as e:
        BackendConfig(f"cuda:{name}")
    assert "expected a backend" in str(e.value)
    reason = unavailable_reason(name)
    assert reason is not None
    assert reason.endswith("; did you mean nccl?")
    assert "did you mean" not in (unavailable_reason("carrier") or "did you mean")


def test_a_backend_string_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="must be a str"):
        BackendConfig(3)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.text(alphabet="cpu:t,m i"))
def test_any_text_is_parsed_or_refused_with_the_grammar(text: str) -> None:
    try:
        config = BackendConfig(text)
    except ValueError as error:
        refusal = str(error)
    else:
        assert config.device_backend_map
        return
    assert "device:backend" in refusal


def test_a_registered_backend_is_known_with_its_devices() -> None:
    Backend.register_backend("there", lambda *_: Backend(0, 1), devices=["cpu", "ext"])
    try:
        assert BackendConfig("there").device_backend_map == {
            "cpu": "there",
            "ext": "there",
        }
        assert str(BackendConfig("cpu:there,cuda:nccl")) == "cpu:there,cuda:nccl"
    finally:
        del Backend.registry["there"]
    with pytest.raises(ValueError, match="unknown backend 'there'"):
        BackendConfig("there")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "a b"}, "expected an identifier"),
        ({"name": "fine", "devices": ()}, "devices is empty"),
        ({"name": "fine", "extended_api": "cpu"}, "devices='cpu'"),
    ],
)
def test_a_bad_registration_is_refused(arguments: dict, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Backend.register_backend(func=lambda *_: Backend(0, 1), **arguments)


def test_the_names_of_backends_are_those_of_c10d() -> None:
    names: list[object] = [Backend.GLOO, Backend.MPI, Backend.NCCL]
    assert names == ["gloo", "mpi", "nccl"]
    parsed: list[Any] = [Backend(name) for name in ("GLOO", "Mine")]  # type: ignore[call-arg, arg-type]
    assert parsed == ["gloo", "mine"]
    assert str(BackendConfig(parsed[0])) == str(BackendConfig("gloo"))
    Backend.register_backend("Loud", lambda *_: Backend(0, 1), False, "ext")
    try:
        assert Backend.LOUD == "loud"  # type: ignore[attr-defined]
        assert BackendConfig("ext:loud").device_backend_map["ext"] == "loud"
    finally:
        del Backend.registry["loud"], Backend.LOUD  # type: ignore[attr-defined]
