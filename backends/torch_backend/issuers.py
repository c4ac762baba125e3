"""What issues an op in a backward pass: the user's line shows only ``backward()``."""

from __future__ import annotations

from types import FrameType

__all__ = ["issuer"]

_PACKAGE = __name__.partition(".")[0]
#: The module whose function runs the engine of autograd.
_ENGINE = "torch.autograd.graph"
#: Modules that stand between: they issue nothing of their own.
_BETWEEN = ("torch._dynamo", "torch._compile", "torch.futures")
#: So do torch's decorators, as that of FSDP2's hooks: what they make has this name.
_DECORATED = "wrapper"
#: DDP's reducer issues all_reduces from C++: no function in Python stands between.
_REDUCER_OP, _REDUCER = "all_reduce", "DistributedDataParallel.backward"


def issuer(op: str, frame: FrameType | None) -> str:
    """Return what issues the op in which `frame` is; empty: the user.

    In a backward pass that is what autograd has called: a hook of DDP or FSDP, or the
    backward of a function; with nothing in Python, DDP itself.
    """
    called = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == _ENGINE:
            if called:
                return called
            return _REDUCER if op == _REDUCER_OP else "backward()"
        package = module.partition(".")[0]
        if package == "torch":
            code = frame.f_code
            if code.co_name != _DECORATED and not module.startswith(_BETWEEN):
                called = getattr(code, "co_qualname", code.co_name)  # 3.11 and later
        elif package != _PACKAGE:
            return ""
        frame = frame.f_back
    return ""
