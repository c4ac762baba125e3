"""The private names of torch: this version has all, and a missing one is told."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from rankscope.backends import torch_watch
from rankscope.backends.torch_backend import private as backend_names
from rankscope.backends.torch_watch.patching import replace
from rankscope.backends.torch_watch.private import groups

WATCH = Path(torch_watch.__file__).parent


def copy_without(name: str) -> ModuleType:
    """Return what `probe` reads of torch's module, but for one name."""
    copy = ModuleType(c10d.__name__)
    vars(copy).update(vars(c10d))
    owner, _, last = name.rpartition(".")
    if not owner:
        delattr(copy, last)
        return copy
    original = getattr(c10d, owner)
    kept = {one: None for one in dir(original) if one != last}
    setattr(copy, owner, SimpleNamespace(**kept))
    return copy


def test_this_torch_has_every_name() -> None:
    assert groups.probe(c10d).missing == []
    assert backend_names.missing == []
    for name in ("_update_process_group", "_remove_autograd_hooks"):
        assert hasattr(DistributedDataParallel, name)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("_new_process_group_helper", "groups are not noted when they are made"),
        ("_update_default_pg", "groups are not rebuilt"),
        ("_world.pg_map", "groups are not shown"),
        ("_world.tags_to_pg", "groups are not rebuilt"),
        ("ProcessGroup._get_backend", "groups are not aborted"),
    ],
)
def test_a_missing_name_is_told_with_what_is_lost(name: str, without: str) -> None:
    (sentence,) = groups.probe(copy_without(name)).missing
    assert re.match(rf"torch [\w.+]+ has no (distributed_c10d\.)?{name}: ", sentence)
    assert without in sentence


def test_a_group_may_be_made_while_the_groups_are_listed() -> None:
    """By another thread, as where a rebuild replaces one."""
    made: dict[object, None] = {}

    class Group:
        def __getattr__(self, name: str) -> None:
            made[object()] = None
            raise AttributeError(name)

    made[group := Group()] = None
    copy = copy_without("_world.pg_map")
    copy._world.pg_map = made
    assert groups.probe(copy).groups() == [group]


def test_a_missing_function_is_not_replaced() -> None:
    lacking = groups.probe(copy_without("_new_process_group_helper"))
    replace(lacking.c10d, groups.MAKER, lambda original: original)()
    assert not hasattr(lacking.c10d, "_new_process_group_helper")


def test_only_the_package_private_names_what_is_private() -> None:
    private = re.compile(r"(c10d|registry|world|group|backend|model|module)\._[a-z]")
    found = [
        f"{path.name}: {line.strip()}"
        for path in WATCH.glob("*.py")
        for line in path.read_text().splitlines()
        if private.search(line)
    ]
    assert found == []
