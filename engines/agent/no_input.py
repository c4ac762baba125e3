"""What is for a person who types, on a rank: each is answered by a sentence."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import StdinNotImplementedError

__all__ = ["end_cell_at_exit", "explain_input"]


_HINT = "%dist_debug -r RANK opens the frame that failed"


def explain_input(kernel: Any, describe: Callable[[str, int], str]) -> None:
    """Have ``input()``, ``%debug`` and ``breakpoint()`` say what there is instead."""

    def no_input(prompt: object = "", *args: object, **options: object) -> NoReturn:
        raise StdinNotImplementedError(
            "input(): nobody types on a rank; %dist_push sends it a value; after an "
            f"error {_HINT}"
        )

    def no_debug(line: str) -> None:
        # No error: it would be the last one, which %dist_debug opens.
        print(f"%debug: nobody types on a rank; {_HINT}", file=sys.stderr)

    def no_breakpoint(*args: object, **options: object) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            # A debugger of the user's own choice, or none.
            return sys.__breakpointhook__(*args, **options)
        frame = sys._getframe(1)
        place = describe(frame.f_code.co_filename, frame.f_lineno)
        print(
            f"breakpoint() at {place} is passed over: nobody types on a rank whose "
            f"cell runs; after an error {_HINT}",
            file=sys.stderr,
        )
        return None

    # ipykernel makes them `input` and `getpass` for the time of each cell.
    kernel.raw_input = kernel.getpass = no_input
    kernel.shell.register_magic_function(no_debug, "line", "debug")
    sys.breakpointhook = no_breakpoint


class _Exit:
    def __call__(self, *arguments: object) -> NoReturn:
        raise SystemExit(repr(self))

    def __repr__(self) -> str:
        return (
            "exit() ends the cell on this rank, and not the rank: "
            "%dist_shutdown ends the ranks"
        )


def end_cell_at_exit(shell: Any) -> None:
    """Have ``exit()`` end the cell: ipykernel's goes on, and ends the process."""
    shell.user_ns["exit"] = shell.user_ns["quit"] = _Exit()
    # IPython's hint at every SystemExit.
    warnings.filterwarnings("ignore", "To exit: use 'exit', 'quit', or Ctrl-D")
