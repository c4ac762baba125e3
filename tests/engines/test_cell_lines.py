"""Lines of cells: also of a cell that awaits something, and is on no stack."""

import ast
import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from rankscope.backends.observe.stacks import MAIN, ThreadStacks
from rankscope.engines.agent.printing import CellSource

CELL = """
async def load():
    await never.wait()

await load()
"""


def _name(file: str) -> tuple[str, str] | None:
    return ("Cell", "In[7]") if file == "/tmp/7.py" else None


def test_a_cell_that_awaits_is_at_the_line_that_awaits() -> None:
    source = CellSource(
        SimpleNamespace(compile=SimpleNamespace(format_code_name=_name))
    )
    assert source.suspended(None) == []
    asyncio.run(_look(source))


async def _look(source: CellSource) -> None:
    never = asyncio.Event()
    code = compile(CELL, "/tmp/7.py", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run_as_ipython() -> None:
        await eval(code, {"never": never})

    task = asyncio.create_task(run_as_ipython())
    await asyncio.sleep(0)
    suspended = source.suspended(task)
    assert source.innermost(0, suspended) == "cell 7 line 3"
    stacks = ThreadStacks(source.name_of, suspended=lambda: suspended)
    found: list[Any] = []
    looker = threading.Thread(target=lambda: found.extend(stacks.now()))
    looker.start()
    looker.join()
    task.cancel()
    assert found[0].thread == MAIN
    calls = [(one.place, one.line, one.function) for one in found[0].frames]
    assert calls[:2] == [("Cell In[7]", 5, "<module>"), ("Cell In[7]", 3, "load")]
