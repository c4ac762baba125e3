"""The list of torch's names, and the arguments of its functions, against torch."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as torch_dist

import rankscope as dist
from tools import torch_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(torch_names.TORCH),
    reason=f"the list is that of torch {torch_names.TORCH}",
)

#: The classes whose members the list has; the stores share those of `Store`.
CLASSES = sorted(
    {name.partition(".")[0] for name in torch_names.names() if "." in name}
)
STORES = ("TCPStore", "FileStore", "HashStore", "PrefixStore")


def public(owner: object) -> Iterator[str]:
    yield from (name for name in dir(owner) if not name.startswith("_"))


def test_the_list_has_every_name_of_torch() -> None:
    found = set(public(torch_dist))
    for name in CLASSES:
        owner = getattr(torch_dist, name)
        inherited = set(dir(torch_dist.Store)) if name in STORES else set(dir(object))
        inherited |= set(dir(str)) if name == "Backend" else set()
        found |= {f"{name}.{one}" for one in {*public(owner)} - inherited}
    # What other tests of this process have brought in is no name of torch's: the
    # backend that they registered, and submodules.
    found.discard("Backend.RANKSCOPE")
    listed = set(torch_names.names())
    extra = {
        name
        for name in found - listed
        if not isinstance(getattr(torch_dist, name, None), types.ModuleType)
    }
    assert extra == set(), "a new name: list it, and write it or say why not"
    assert listed - found == set(), "torch no longer has it"


def _functions() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            name
            for name in public(torch_dist)
            if isinstance(getattr(torch_dist, name), types.FunctionType)
            and name not in torch_names.WHY_NOT
        ]


@pytest.mark.parametrize("name", _functions())
def test_a_function_takes_what_torchs_takes_in_the_same_place(name: str) -> None:
    theirs = [
        (one.name, one.kind)
        for one in inspect.signature(getattr(torch_dist, name)).parameters.values()
        if not one.name.startswith("_")
    ]
    ours = inspect.signature(getattr(dist, name)).parameters
    assert [(one.name, one.kind) for one in ours.values()][: len(theirs)] == theirs
