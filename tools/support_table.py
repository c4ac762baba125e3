"""``python -m tools.support_table``: the tables of what each backend can do.

Writes them into ``docs/backends.md``, between their markers. The rows are those of
`OpType`; the cells come from the classes of the backends: which methods a class
defines, and what its `check` refuses.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

import rankscope as dist
from rankscope.backends.collectives import objects, sparse
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.op import Op
from rankscope.backends.interface.registry import builtin_devices, resolve
from rankscope.backends.interface.staging import StagedBackend

__all__ = [
    "DTYPES",
    "NCCL_CALLS",
    "OPS",
    "PAGE",
    "classes",
    "fallback",
    "main",
    "ops",
    "page",
    "put",
    "reductions",
    "support",
]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "backends.md"


def ops() -> tuple[str, ...]:
    """Return the methods of a backend that run an op of the public interface."""
    return (
        *(op.value for op in dist.OpType if op.spec.arguments is not None),
        *(f"{op.value}_coalesced" for op in dist.OpType if op.spec.fused),
    )


OPS = ops()

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

# What the calls of each method of `NCCLBackend` are: the names of NCCL's functions say
# more than the methods'.
NCCL_CALLS: dict[str, tuple[str, ...]] = {
    "broadcast": ("ncclBroadcast",),
    "all_reduce": ("ncclAllReduce",),
    "reduce": ("ncclReduce",),
    "all_gather": ("ncclBroadcast",),
    "all_gather_into_tensor": ("ncclAllGather",),
    "gather": ("ncclSend", "ncclRecv"),
    "scatter": ("ncclSend", "ncclRecv"),
    "reduce_scatter": ("ncclReduce",),
    "reduce_scatter_tensor": ("ncclReduceScatter",),
    "all_to_all": ("ncclSend", "ncclRecv"),
    "barrier": ("ncclAllReduce",),
    "send": ("ncclSend",),
    "recv": ("ncclRecv",),
    "all_reduce_coalesced": ("ncclAllReduce",),
    "all_gather_coalesced": ("ncclBroadcast",),
    "all_gather_into_tensor_coalesced": ("ncclAllGather",),
    "reduce_scatter_tensor_coalesced": ("ncclReduceScatter",),
}

# Public functions that are made of ops, whatever the backend.
_MADE: dict[str, Callable[..., Any]] = {
    "all_gather_object": objects.all_gather_object,
    "broadcast_object_list": objects.broadcast_object_list,
    "gather_object": objects.gather_object,
    "scatter_object_list": objects.scatter_object_list,
    "send_object_list": objects.send_object_list,
    "recv_object_list": objects.recv_object_list,
    "all_reduce": sparse.sparse_all_reduce,
}


def classes() -> dict[str, type[Backend]]:
    """Return the backends of this version, by name, usable here or not."""
    found = {}
    for name in builtin_devices():
        try:
            creator = resolve(name).creator
        except dist.DistBackendError:
            continue  # announced, and not part of this version
        module = inspect.getmodule(creator)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Backend)
                and value.name == name
            ):
                found[name] = value
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Yield every name that a function uses, and those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def fallback(op: str) -> str | None:
    """Return the method that the base class builds `op` from, or ``None``."""
    single = op.removesuffix("_coalesced")
    # A coalesced op is handed to the op of its name, on a flat copy.
    return single if single != op else dist.OpType(op).spec.fallback or None


def support(kind: type[Backend], op: str) -> str | None:
    """Return how `kind` does `op`: ``"own"``, the method it is built from, ``None``."""
    if getattr(kind, op) is not getattr(Backend, op):
        return "own"
    base = fallback(op)
    return base if base is not None and support(kind, base) else None


def reductions(name: str) -> dict[str, dict[dist.ReduceOp, str | None]]:
    """Return how backend `name` reduces each dtype by each reduction.

    ``"own"``: it has the reduction; ``"SUM"``: AVG as a SUM and a division, PREMUL_SUM
    as a SUM of products; ``None``: the reduction is refused.
    """
    # check() uses the class alone: no library has to be installed or loaded.
    kind = classes()[name]
    backend = kind.__new__(kind)
    return {
        dtype: {op: _reduction(backend, dtype, op) for op in dist.ReduceOp}
        for dtype in DTYPES
    }


def _reduction(backend: Backend, dtype: str, op: dist.ReduceOp) -> str | None:
    premul = op is dist.ReduceOp.PREMUL_SUM
    tried = dist.make_nccl_premul_sum(0.5) if premul else op
    try:
        array = np.empty(0, dtype)
        call = Op(dist.OpType.ALL_REDUCE, "", (array,), (array,), reduce_op=tried)
        call.check(backend)
    except (TypeError, ValueError):
        return None
    made = op in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
    return "SUM" if made and op not in backend.reduce_ops else "own"


# -- the page ------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(how: str | None, yes: str = "yes") -> str:
    if how is None:
        return "no"
    return yes if how == "own" else f"by `{how}`"


def _native_cell(kind: type[Backend], op: str) -> str:
    """Return the cell of arrays in the memory that the backend works on."""
    calls = NCCL_CALLS.get(op, ()) if kind.name == "nccl" else ()
    return _cell(support(kind, op), ", ".join(f"`{call}`" for call in calls) or "yes")


def _staged_cell(kind: type[Backend], op: str) -> str:
    """Return the cell of arrays elsewhere, which are copied to host memory."""
    if support(StagedBackend, op) is None or support(kind, op) is None:
        return "no"
    if not _moves_arrays(op):
        return _native_cell(kind, op)
    how = support(kind, op)
    return "staged" if how == "own" else f"staged, {_cell(how)}"


def _moves_arrays(op: str) -> bool:
    return bool(dist.OpType(op.removesuffix("_coalesced")).spec.arguments)


def _can_be_staged_to(name: str) -> bool:
    return "cpu" in resolve(name).devices


def _ops_table() -> str:
    kinds = classes()
    head = ["operation"]
    for name in kinds:
        head.append(f"{name}, {' '.join(resolve(name).devices)}")
        if _can_be_staged_to(name):
            head.append(f"{name}, elsewhere")
    rows = []
    for op in OPS:
        row = [f"`{op}`"]
        for name, kind in kinds.items():
            row.append(_native_cell(kind, op))
            if _can_be_staged_to(name):
                row.append(_staged_cell(kind, op))
        base = fallback(op)
        rows.append([*row, "to be written" if base is None else _cell(base)])
    return _table([*head, "one of your own"], rows)


def _made_table() -> str:
    rows = []
    for name, function in _MADE.items():
        used = [op for op in OPS if op in _ops_of(function)]
        rows.append(
            [
                f"`{name}`" + " of a sparse matrix" * (name == "all_reduce"),
                ", ".join(f"`{op}`" for op in used),
            ]
        )
    return _table(["function", "made of"], rows)


def _ops_of(function: Callable[..., Any]) -> set[str]:
    found: set[str] = set()
    for name in _names(function.__code__):
        name = {"isend": "send", "irecv": "recv"}.get(name, name)
        value = function.__globals__.get(name)
        if name in OPS:
            found.add(name)
        elif getattr(value, "__module__", None) == function.__module__:
            functions = vars(value).values() if inspect.isclass(value) else [value]
            for one in filter(inspect.isfunction, functions):
                found |= _ops_of(one)
    return found


def _dtypes_table(name: str) -> str:
    ops = list(dist.ReduceOp)
    rows = []
    for dtype, row in reductions(name).items():
        wide = np.dtype(dtype) == np.float16
        cells = [
            "by `SUM` of float32"
            if wide and op is dist.ReduceOp.PREMUL_SUM and row[op] == "SUM"
            else _cell(row[op])
            for op in ops
        ]
        rows.append([dtype, *cells])
    return _table(["dtype", *(op.name for op in ops)], rows)


def page(text: str) -> str:
    """Return `text`, a page with markers, with the tables of today's code."""
    tables = {"ops": _ops_table(), "made": _made_table()}
    tables |= {f"{name} reductions": _dtypes_table(name) for name in classes()}
    for name, table in tables.items():
        text = put(text, name, table)
    return text


def put(page: str, name: str, content: str) -> str:
    """Return `page` with a new content between the markers of `name`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ends, after = rest.partition(end)
    if not found or not ends:
        raise ValueError(f"the page has no place for {name!r}: {begin} {end}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
