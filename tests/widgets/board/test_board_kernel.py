"""The board in a real kernel, with a front end that has no subshells."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from tests.magics.kernels import bare_kernel

pytestmark = pytest.mark.processes

TIMEOUT = 90

HANG = """%%distributed
if rank != 2:
    dist.all_reduce(np.ones(4))
"""


class FrontEnd:
    """What a page does: runs cells, sends clicks, takes in what comes."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = []
        self.comm = ""

    def send(self, **content: Any) -> None:
        """Send the board's Python side a message, on the main shell."""
        data = {"method": "custom", "content": content}
        message = self.client.session.msg(
            "comm_msg", {"comm_id": self.comm, "data": data}
        )
        self.client.shell_channel.send(message)

    def run(self, code: str) -> str:
        """Send a cell; return the id of the request."""
        # As a cell that fails in a notebook, but those behind it run all the same.
        return self.client.execute(code, stop_on_error=False)

    def find(self, wanted: Callable[[dict[str, Any]], Any]) -> Any:
        """Wait for a message of which ``wanted(message)`` is true; return that."""
        place = 0
        deadline = time.monotonic() + TIMEOUT
        while True:
            for message in self.messages[place:]:
                found = wanted(message)
                if found:
                    return found
            place = len(self.messages)
            try:
                left = deadline - time.monotonic()
                self.messages.append(self.client.get_iopub_msg(timeout=left))
            except queue.Empty:
                kinds = [message["msg_type"] for message in self.messages]
                raise AssertionError(f"not among {kinds}") from None

    def ended(self, request: str) -> bool:
        """Whether a cell is over, by what came in so far."""
        return any(_is_idle(message, request) for message in self.messages)

    def wait(self, request: str) -> str:
        """Wait until a cell is over; return what it printed and how it failed."""
        self.find(lambda message: _is_idle(message, request))
        said = []
        for message in self.messages:
            if message["parent_header"].get("msg_id") == request:
                content = message["content"]
                said.append(content.get("text", ""))
                if message["msg_type"] == "error":
                    said.append(" ".join(content["traceback"]))
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(said))

    def reported(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for a message of the board to its page."""

        def look(message: dict[str, Any]) -> Any:
            if message["msg_type"] != "comm_msg":
                return None
            content = message["content"]["data"].get("content", {})
            same = content.get("type") == kind and fields.items() <= content.items()
            return content if same else None

        return self.find(look)

    def rows(self, **cells: Any) -> None:
        """Wait until a row of the board has these cells."""

        def look(message: dict[str, Any]) -> bool:
            if message["msg_type"] != "comm_msg":
                return False
            rows = message["content"]["data"].get("content", {}).get("rows", {})
            return any(
                row is not None and cells.items() <= row.items()
                for group in rows.values()
                for row in group.values()
            )

        self.find(look)


def _is_idle(message: dict[str, Any], request: str) -> bool:
    return (
        message["parent_header"].get("msg_id") == request
        and message["msg_type"] == "status"
        and message["content"]["execution_state"] == "idle"
    )


@pytest.fixture(scope="module")
def page(_module_leaves_nothing: None) -> Iterator[FrontEnd]:
    """A front end with four ranks and their board."""
    with bare_kernel() as (_, client):
        page = FrontEnd(client)
        page.wait(page.run("%load_ext rankscope\n%dist_init -n 4 --timeout 60"))
        page.comm = page.find(
            lambda m: (
                m["msg_type"] == "comm_open"
                and m["content"]["data"]["state"].get("_anywidget_id")
                == "rankscope.widgets.board.widget.Board"
                and m["content"]["comm_id"]
            )
        )
        yield page


def _bundle(page: FrontEnd, kind: str, text: str) -> dict[str, Any]:
    return page.find(
        lambda m: (
            m["msg_type"] == kind
            and text in m["content"]["data"].get("text/html", "")
            and m["content"]["data"]
        )
    )


def test_the_output_is_html_with_the_state(page: FrontEnd) -> None:
    bundle = _bundle(page, "display_data", "rankscope-board")
    assert bundle.keys() == {"text/plain", "text/html"}
    assert "4 ranks" in bundle["text/plain"]


def test_a_page_gets_everything_and_then_what_changes(page: FrontEnd) -> None:
    page.send(watch="page")
    full = page.reported("full")
    assert full["banner"]["title"] == "Idle"
    (rows,) = full["rows"].values()
    assert [rows[str(rank)]["state"] for rank in range(4)] == ["idle"] * 4
    page.wait(page.run("%%distributed\ndist.all_reduce(np.ones(1 << 20))"))
    page.rows(seq="#1", op="all_reduce")
    # What was last is put into the output, for when the notebook is saved.
    assert "8 MiB" in _bundle(page, "update_display_data", "all_reduce")["text/html"]


def test_where_no_page_looks_a_cell_ends_with_its_state(page: FrontEnd) -> None:
    """As under ``nbconvert --execute``, which takes nothing in after the last cell."""
    for name in ("page", "other"):
        page.send(unwatch=name)
    size = 0

    def kept() -> bool:
        nonlocal size
        size += 1
        cell = page.run(f"%%distributed\ndist.all_reduce(np.ones({size} << 17))")
        page.wait(cell)
        updates = [
            one["content"]["data"]["text/html"]
            for one in page.messages
            if one["msg_type"] == "update_display_data"
            and one["parent_header"].get("msg_id") == cell
        ]
        last = updates[-1] if updates else ""
        return f"{size} MiB" in last and "Running" not in last

    # The thread that served the pages ends a moment after they have left.
    until(kept, TIMEOUT)


def test_beats_come_while_nothing_changes(page: FrontEnd) -> None:
    page.send(watch="page")
    page.reported("full")
    page.messages.clear()
    assert page.reported("beat")["now"] > 0


def test_clicks_count_while_a_cell_blocks_the_main_thread(page: FrontEnd) -> None:
    page.send(watch="page")
    page.messages.clear()
    cell = page.run(HANG)
    page.rows(state="in flight", queue=1)
    # Cells that wait for their turn stay where they are.
    after = [page.run(f"print('cell {number}')") for number in range(3)]
    _open_a_page(page)
    page.send(do="profile", id="profile")
    stacks = page.reported("did", id="profile")["stacks"]
    assert re.search(r"ranks 0–1, 3: at cell \d+ line 3", stacks), stacks
    # The cell itself says why it hangs, until it is over.
    why = _bundle(page, "display_data", "-hang")
    assert why["text/plain"].startswith("Missing ranks: rank 2 has not entered")
    page.send(do="abort", groups=["g0"], id="click")
    did = page.reported("did", id="click")
    assert did["ok"], did
    assert not page.ended(cell)
    assert "requested from the board" in page.wait(cell)
    assert any(message["msg_type"] == "clear_output" for message in page.messages)
    assert [page.wait(request) for request in after] == [
        f"cell {number}\n" for number in range(3)
    ]
    order = [
        message["parent_header"]["msg_id"]
        for message in page.messages
        if message["msg_type"] == "execute_input"
    ]
    assert order == [cell, *after]


def _open_a_page(page: FrontEnd) -> None:
    """Ask what a page asks that opens while a cell runs, and get the answers."""
    request = page.client.kernel_info()
    # Behind the replies to the cells before.
    while page.client.get_shell_msg(timeout=TIMEOUT)["msg_type"] != "kernel_info_reply":
        pass
    page.find(lambda message: _is_idle(message, request))
    session = page.client.session
    target = {"comm_id": "control", "target_name": "jupyter.widget.control"}
    protocol = {"version": "1.0.0"}
    opened = session.msg("comm_open", {**target, "data": {}}, metadata=protocol)
    page.client.shell_channel.send(opened)
    question = {"comm_id": "control", "data": {"method": "request_states"}}
    page.client.shell_channel.send(session.msg("comm_msg", question))
    states = page.find(
        lambda m: (
            m["msg_type"] == "comm_msg"
            and m["content"]["comm_id"] == "control"
            and m["content"]["data"]["states"]
        )
    )
    assert states[page.comm]["state"]["snapshot"]["type"] == "full"


def test_a_group_is_rebuilt_by_a_click(page: FrontEnd) -> None:
    page.send(watch="page")
    page.send(do="rebuild", groups=["g0"], id="rebuild")
    assert page.reported("did", id="rebuild")["ok"]
    said = page.wait(
        page.run("%%distributed\nx = np.ones(3)\ndist.all_reduce(x)\nx[0]")
    )
    assert "Error" not in said


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"do": "abort", "groups": ["g99"]}, "a group does not exist any more"),
        ({"do": "abort"}, "a group does not exist any more"),
        ({"do": "format the disk"}, "the board cannot do 'format the disk'"),
        ({"do": ["abort"]}, "the board cannot do ['abort']"),
    ],
)
def test_what_cannot_be_done_is_said(
    page: FrontEnd, request_: dict[str, Any], text: str
) -> None:
    page.messages.clear()
    page.send(id="odd", **request_)
    did = page.reported("did", id="odd")
    assert not did["ok"]
    assert did["text"] == text


def test_the_timeline_has_what_was_done(page: FrontEnd) -> None:
    page.wait(page.run("%%distributed\ndist.all_reduce(np.ones(4))"))
    page.send(do="records", id="records")
    lanes = page.reported("timeline")["lanes"]
    assert [lane["rank"] for lane in lanes] == [0, 1, 2, 3]
    assert all(lane["works"] for lane in lanes)


def test_a_line_of_the_notebook(page: FrontEnd) -> None:
    request = page.run("# the first line\nwhere = 1")
    # The number that the notebook shows: execution_count is that of the next cell,
    # in newer IPythons, while a cell runs.
    number = page.find(
        lambda m: (
            m["msg_type"] == "execute_input"
            and m["parent_header"].get("msg_id") == request
            and m["content"]["execution_count"]
        )
    )
    page.send(do="source", line=f"cell {number} line 1", id="line")
    assert page.reported("did", id="line")["text"] == "# the first line"


def test_nothing_is_done_while_nobody_looks(page: FrontEnd) -> None:
    page.send(watch="page")
    page.send(unwatch="page")
    running = "from rankscope.magics.session import session\nsession._board.running"
    page.send(unwatch="page")

    def stopped() -> bool:
        request = page.run(running)
        page.wait(request)
        return (
            page.find(
                lambda m: (
                    m["msg_type"] == "execute_result"
                    and m["parent_header"]["msg_id"] == request
                    and m["content"]["data"]["text/plain"]
                )
            )
            == "False"
        )

    deadline = time.monotonic() + TIMEOUT
    while not stopped():
        assert time.monotonic() < deadline


def test_it_may_be_shown_again(page: FrontEnd) -> None:
    page.messages.clear()
    page.wait(page.run("%dist_board"))
    assert "4 ranks" in _bundle(page, "display_data", "rankscope-board")["text/html"]


def test_a_second_start_shows_it_below_its_cell(page: FrontEnd) -> None:
    """The cell that had it runs again with all cells; its output begins anew."""
    page.messages.clear()
    assert "already running: 4 ranks" in page.wait(
        page.run("%dist_init -n 4 --timeout 60")
    )
    assert "4 ranks" in _bundle(page, "display_data", "rankscope-board")["text/html"]


def test_a_handle_says_why_its_cell_hangs_until_it_goes_on(page: FrontEnd) -> None:
    page.wait(page.run("%dist_rebuild"))
    page.messages.clear()
    page.wait(page.run(HANG.replace("distributed", "distributed --async")))
    why = _bundle(page, "update_display_data", "-hang")
    assert "Missing ranks: rank 2 has not entered" in why["text/plain"]
    page.messages.clear()
    page.wait(page.run("%%distributed -r 2\ndist.all_reduce(np.ones(4))"))
    over = _bundle(page, "update_display_data", "done after")
    assert "-hang" not in over["text/html"]


def test_a_cell_says_nothing_of_a_hang_where_that_is_off(page: FrontEnd) -> None:
    told = "from rankscope.magics.session import session\nprint(session.in_cells)"
    for state in ("off", "on"):
        page.wait(page.run(f"%dist_board --in-cells {state}"))
        assert page.wait(page.run(told)) == f"{state == 'on'}\n"
    assert "expected on or off" in page.wait(page.run("%dist_board --in-cells of"))


def test_it_may_be_pinned(page: FrontEnd) -> None:
    for flag, pinned in [("--pin", True), ("--unpin", False)]:
        page.messages.clear()
        page.wait(page.run(f"%dist_board {flag}"))
        page.find(partial(_has_pinned, pinned))


def test_a_front_end_with_frames_gets_a_view_and_no_bar(page: FrontEnd) -> None:
    """VS Code says itself so, by a variable: its pages find no output of a cell."""
    page.messages.clear()
    page.wait(page.run("__vsc_ipynb_file__ = 'train.ipynb'\n%dist_board"))
    bundle = _bundle(page, "display_data", "rankscope-board")
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == page.comm
    page.messages.clear()
    assert "There is no bar here" in page.wait(page.run("%dist_board --pin"))
    assert not any(_has_pinned(True, message) for message in page.messages)
    page.wait(page.run("del __vsc_ipynb_file__"))


def _has_pinned(pinned: bool, message: dict[str, Any]) -> bool:
    if message["msg_type"] != "comm_msg":
        return False
    return message["content"]["data"].get("state", {}).get("pinned") is pinned


def test_in_the_end_the_state_that_was_last_remains(page: FrontEnd) -> None:
    page.messages.clear()
    said = page.wait(page.run("%dist_shutdown"))
    assert "4 ranks ended" in said or "Error" not in said
    bundle = _bundle(page, "update_display_data", "Ended")
    # As they were, not as they are now.
    assert "idle" in bundle["text/html"]
    assert "dead" not in bundle["text/html"]
    page.find(
        lambda m: m["msg_type"] == "comm_close" and m["content"]["comm_id"] == page.comm
    )


def test_the_ranks_are_replaced_and_the_bar_goes_on_to_their_board(
    page: FrontEnd,
) -> None:
    pids = (
        "from rankscope.magics import current_cluster\n"
        "print(*current_cluster().pids.values())"
    )
    page.messages.clear()
    page.wait(page.run("%dist_init -n 2 --timeout 60"))
    page.wait(page.run("%dist_board --pin"))
    before = [psutil.Process(int(pid)) for pid in page.wait(page.run(pids)).split()]
    assert len(before) == 2
    refused = page.wait(page.run("%dist_init -n 1"))
    assert "--replace swaps them for new ones" in refused
    page.messages.clear()
    page.wait(page.run("%dist_init -n 1 --replace"))
    page.find(
        lambda m: (
            m["msg_type"] == "comm_open"
            and m["content"]["data"]["state"].get("pinned") is True
        )
    )
    until(lambda: not any(map(lives, before)), TIMEOUT, "the ranks before to end")
    assert page.wait(page.run("%%distributed\nprint(world_size)")) == "1\n"
    assert "Error" not in page.wait(page.run("%dist_shutdown"))


def test_a_call_that_ends_the_ranks_ends_their_board(page: FrontEnd) -> None:
    """No page shows it, and no magic follows: the output of its cell says so still."""
    page.wait(page.run("%dist_init -n 1 --replace --timeout 60"))
    page.messages.clear()
    page.wait(
        page.run(
            "from rankscope.magics import current_cluster\n"
            "current_cluster().execute('dist.barrier()').result(60)\n"
            "current_cluster().shutdown()"
        )
    )
    html = _bundle(page, "update_display_data", "Ended")["text/html"]
    assert "barrier" in html
    assert "dead" not in html
