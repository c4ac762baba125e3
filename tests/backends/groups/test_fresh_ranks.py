"""The groups of other ranks on a fresh rank that lacks a backend of theirs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.errors import DistBackendError
from rankscope.backends.groups.world import world
from rankscope.backends.interface import registry

Make = Callable[[type[dist.Backend]], dist.ProcessGroup]


class Bare(dist.Backend):
    """Has no op."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)


IMPORTED = """
import rankscope as dist
class Imported(dist.Backend):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
if {registers}:
    dist.Backend.register_backend("imported", Imported, devices="cpu")
"""


@pytest.fixture
def registered_elsewhere(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> Make:
    """Make a group with a backend, and import the group where nobody registered it."""
    monkeypatch.setattr(registry, "_registered_elsewhere", {})

    def make(creator: type[dist.Backend]) -> dist.ProcessGroup:
        dist.Backend.register_backend("imported", creator, devices="cpu")
        dist.new_group([0, 1], group_desc="tp", backend="cpu:imported")
        exported = json.loads(json.dumps(world.export_groups()))
        world.destroy(world.get_group("tp"))
        del dist.Backend.registry["imported"]
        assert world.import_groups(exported) == ["tp"]
        return world.get_group("tp")

    return make


@pytest.mark.parametrize("registers", [True, False])
def test_a_fresh_rank_imports_the_module_that_registers_a_backend(
    registered_elsewhere: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    registers: bool,
) -> None:
    text = IMPORTED.format(registers=registers)
    (tmp_path / "module_of_a_backend.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("module_of_a_backend")
    monkeypatch.delitem(sys.modules, "module_of_a_backend")
    tp = registered_elsewhere(module.Imported)
    assert "imported" in registry.known_backends()
    words = (
        "does not implement barrier"
        if registers
        else (
            "barrier in group 'tp' on rank 0: no backend 'imported' is registered on "
            "this rank: importing 'module_of_a_backend' does not register it; run"
        )
    )
    kind = NotImplementedError if registers else DistBackendError
    with pytest.raises(kind, match=words):
        dist.barrier(tp)
    dist.Backend.registry.pop("imported", None)


def test_a_module_that_a_fresh_rank_cannot_import(
    registered_elsewhere: Make,
) -> None:
    tp = registered_elsewhere(type("Gone", (Bare,), {"__module__": "no_such"}))
    words = "cannot be imported here: ModuleNotFoundError: No module named 'no_such'"
    with pytest.raises(DistBackendError, match=words):
        dist.barrier(tp)


def test_a_backend_that_a_cell_registered_needs_the_cell_on_a_fresh_rank(
    registered_elsewhere: Make,
) -> None:
    creator = type("Cell", (Bare,), {"__module__": "__main__"})
    tp = registered_elsewhere(creator)
    assert "imported" not in registry.known_backends()
    with pytest.raises(DistBackendError, match="run that cell on this rank, too"):
        dist.barrier(tp)
    dist.Backend.register_backend("imported", creator, devices="cpu")
    with pytest.raises(NotImplementedError):
        dist.barrier(tp)
    del dist.Backend.registry["imported"]
