"""Its buttons end a hang in each front end, with each ipykernel.

JupyterLab 4 with ipykernel 7 is in `test_board_browser`. ipykernel 6 has no
subshells: there the cell that blocks the kernel has the clicks served.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.other_environments import notebook_python

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.widgets.lab import FrontEnd, Lab

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.timeout(600),
]

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "05_hang.ipynb"


@pytest.fixture(scope="module")
def older() -> str:
    """The Python of the environment with Notebook 7 and ipykernel 6."""
    reasons: list[str] = []
    python = notebook_python(print, reasons.append)
    assert python is not None, reasons
    return python


@pytest.fixture(scope="module", params=["lab", "notebook"])
def server(
    request: pytest.FixtureRequest,
    browser: Browser,
    older: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    """Each front end, from that environment, and dark."""
    from tests.widgets.lab import lab

    front_end: FrontEnd = request.param
    folder = tmp_path_factory.mktemp("server")
    with lab(folder, browser, front_end, older, dark=True) as found:
        yield found


@pytest.mark.parametrize("ipykernel", [6, 7])
def test_a_click_ends_a_cell_that_blocks_the_kernel(
    server: Lab, older: str, ipykernel: int
) -> None:
    from tests.widgets.person import Person

    if (server.front_end, ipykernel) == ("lab", 7):
        pytest.skip("see test_board_browser")
    python = older if ipykernel == 6 else sys.executable
    name = f"{server.front_end}-ipykernel{ipykernel}"
    person = Person(server.open(NOTEBOOK, python=python), name)
    for cell in ("load", "init", "patience", "kept"):
        person.finish(cell)
    person.notebook.board.wait_for()
    person.run("missing")
    person.banner("^In flight")
    assert person.notebook.is_running("missing")
    person.shot("in-flight")
    assert "requested from the board" in person.abort("missing")
    person.banner("^Aborted")
    person.shot("aborted")
    person.rebuild()
    assert "[0-3] [60. 60. 60.]" in person.finish("check")
    assert "4 ranks ended" in person.finish("shutdown")
    assert person.notebook.errors == []
