"""BackendConfig: the grammar, the defaults, and what breaks it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.backends import Backend, BackendConfig
from rankscope.backends.config import gloo_has_wheels


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gloo", {"cpu": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cuda:gloo , cpu:mpi", {"cuda": "gloo", "cpu": "mpi"}),
        ("ext:mpi", {"ext": "mpi"}),
    ],
)
def test_what_the_grammar_accepts(text: str, expected: dict[str, str]) -> None:
    config = BackendConfig(text)
    assert config.get_device_backend_map() == expected
    assert BackendConfig(str(config)) == config
    assert hash(BackendConfig(str(config))) == hash(config)
    assert str(config) in repr(config)


@pytest.mark.parametrize("text", [None, ""])
def test_the_default_is_what_is_installed(text: str | None) -> None:
    cpu = BackendConfig(text).device_backend_map["cpu"]
    assert cpu == ("gloo" if gloo_has_wheels() else "mpi")


@pytest.mark.parametrize(
    ("text", "offending"),
    [
        ("cpu:", "'cpu:'"),
        (":gloo", "':gloo'"),
        ("cpu:gloo,", "''"),
        (",cpu:gloo", "''"),
        ("cpu:gloo,,cuda:nccl", "''"),
        ("cpu:gloo:nccl", "'cpu:gloo:nccl'"),
        ("cpu:gloo,nccl", "'nccl'"),
        ("cpu:gloo,cpu:mpi", "'cpu' is given twice"),
        ("cpu:fancy", "'fancy'"),
        ("fancy", "'fancy'"),
        ("c pu:gloo", "'c pu'"),
        ("gloo,mpi", "gloo,mpi"),
    ],
)
def test_what_breaks_the_grammar_is_named(text: str, offending: str) -> None:
    with pytest.raises(ValueError, match="expected a backend") as caught:
        BackendConfig(text)
    assert offending in str(caught.value)


def test_a_backend_string_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="must be a str"):
        BackendConfig(3)  # type: ignore[arg-type]


@given(st.text(alphabet="cpu:glo,m i"))
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
        ({"name": "Bad"}, "lower-case"),
        ({"name": "a b"}, "lower-case"),
        ({"name": "fine", "devices": ()}, "devices is empty"),
        ({"name": "fine", "extended_api": True}, "extended_api"),
    ],
)
def test_a_bad_registration_is_refused(arguments: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Backend.register_backend(creator=lambda *_: Backend(0, 1), **arguments)
