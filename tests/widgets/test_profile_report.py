"""Where ranks are, as text; where they spent their time, as a table and a picture."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.stacks import (
    MAIN,
    Frame,
    Stack,
    StackSampler,
    ThreadStacks,
)
from rankscope.engines import Profile, RankStacks
from rankscope.engines.observe.profiling import Sampled
from rankscope.widgets import ProfileReport
from rankscope.widgets.stack_text import stack_text
from tests.widgets.untrusted import words

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CALL = Frame("Cell In[7]", 5, "<module>", "dist.all_reduce(x)", False)
SLOW = Frame("Cell In[7]", 3, "load", "time.sleep(1)", False)
LOAD = Frame("Cell In[7]", 4, "<module>", "x = load()", False)


def _op(line: int) -> tuple[Frame, ...]:
    """Return the frames of an op that waits at some line of its own."""
    return (
        Frame("/r/collectives/reductions.py", 75, "all_reduce", "finish()", True),
        Frame("/r/work/work.py", line, "Work.wait", "block()", True),
    )


def _main(*frames: Frame) -> Stack:
    return Stack(MAIN, frames)


# -- now --------------------------------------------------------------------------


def test_equal_stacks_are_shown_once_and_the_inside_of_an_op_is_not() -> None:
    found = RankStacks(
        {
            0: [_main(LOAD, SLOW)],
            1: [_main(CALL, *_op(10))],
            2: [_main(CALL, *_op(20))],
            3: [_main()],
        },
        errors={4: "no answer within 2 s", 5: "no answer within 2 s"},
    )
    assert stack_text(found).split("\n\n") == [
        "rank 0: at cell 7 line 3\n"
        "    cell 7 line 4  x = load()\n"
        "    cell 7 line 3  in load  time.sleep(1)",
        "ranks 1–2: at cell 7 line 5\n"
        "    cell 7 line 5  dist.all_reduce(x)\n"
        "    Rankscope      in all_reduce",
        "rank 3: idle: no cell runs",
        "ranks 4–5: no answer within 2 s",
    ]
    every = stack_text(found, every=True)
    assert "work.py line 10" in every
    assert "rank 2: at cell 7 line 5" in every


def test_other_threads_follow_from_their_own_function_on() -> None:
    begin = Frame("/usr/lib/python3.12/threading.py", 1, "Thread.run", "run()", False)
    worker = Stack("loader", (begin, SLOW))
    text = stack_text(RankStacks({0: [_main(CALL), worker]}))
    assert "  thread loader\n    cell 7 line 3  in load  time.sleep(1)" in text
    assert "threading.py" not in text


def test_a_script_is_shown_without_what_runs_it() -> None:
    files = ("<frozen runpy>", "/venv/rankscope/torch.py", "/python3.10/runpy.py")
    runs = [Frame(file, 86, "_run_code", "exec(code)", False) for file in files]
    found = RankStacks({0: [_main(*runs, CALL)]})
    assert stack_text(found) == stack_text(RankStacks({0: [_main(CALL)]}))


# -- over some seconds ------------------------------------------------------------


def _profile() -> Profile:
    """Rank 0 loads for 4 of 5 seconds, meanwhile ranks 1 to 3 wait for it."""
    late = [(_main(LOAD, SLOW), 4.0), (_main(CALL, *_op(1)), 0.5), (_main(), 0.5)]
    waits = [(_main(CALL, *_op(1)), 3.0), (_main(CALL, *_op(2)), 2.0)]
    return Profile(
        {0: Sampled(5.0, 500, late), **{r: Sampled(5.0, 500, waits) for r in (1, 2, 3)}}
    )


def test_the_table_tells_ranks_apart() -> None:
    assert repr(ProfileReport(_profile())).splitlines() == [
        "ranks 0–3, sampled for 5.0 s",
        "",
        "s per rank  ranks      line           in",
        "       5.0  ranks 1–3  cell 7 line 5  all_reduce",
        "       4.0  rank 0     cell 7 line 3  time.sleep(1)",
        "       0.5  rank 0     cell 7 line 5  all_reduce",
        "       0.5  rank 0     idle",
    ]


def test_ranks_without_an_answer_are_named() -> None:
    profile = Profile(_profile().ranks, {4: "it is dead"})
    assert "left out: rank 4: it is dead" in repr(ProfileReport(profile))
    assert "left out: rank 4: it is dead" in _html(profile)


def _html(profile: Profile) -> str:
    return ProfileReport(profile)._repr_mimebundle_()["text/html"]


def test_text_of_cells_is_escaped() -> None:
    evil = Frame("Cell In[1]", 1, "<module>", 'print("<b>&</script>")', False)
    html = _html(Profile({0: Sampled(1.0, 100, [(_main(evil), 1.0)])}))
    assert "<b>&" not in html
    assert html.count("</script>") == 1


def test_a_page_that_is_not_trusted_has_the_table() -> None:
    report = ProfileReport(_profile())
    assert words(report.html()) == " ".join(repr(report).split())


def test_a_picture_of_many_stacks_stays_small() -> None:
    weights = [
        (_main(Frame("Cell In[1]", line, "f", "pass", False)), 0.001)
        for line in range(10_000)
    ]
    assert len(_html(Profile({0: Sampled(0.1, 10, weights)}))) < 3_000_000


def _boxes(*stacks: tuple[Frame, ...]) -> list[str]:
    """Return the labels of the boxes, callers first, where each stack takes 1 s."""
    seen = [(_main(*frames), 1.0) for frames in stacks]
    html = _html(Profile({0: Sampled(float(len(seen)), 100, seen)}))
    return re.findall(r'<button type="button" class="\w+" title="[^"]*">([^<]+)<', html)


def test_a_generator_that_is_left_and_entered_again_is_one_box() -> None:
    loop = Frame("Cell In[7]", 9, "<module>", "for x in batches():", False, 1)
    lines = [
        Frame("Cell In[7]", n, "batches", f"x = load({n})", False, 2) for n in (3, 4, 4)
    ]
    calls = [(loop, one) for one in lines]
    assert _boxes(*calls) == [
        "all",
        "cell 7 line 9 · for x in batches():",
        "batches · cell 7",
        "cell 7 line 4 · x = load(4)",
        "cell 7 line 3 · x = load(3)",
    ]


def test_a_function_of_a_library_is_one_box_whatever_its_line() -> None:
    path = "/lib/python3.12/site-packages/data/loader.py"
    calls = [(LOAD, Frame(path, n, "Loader.next", "", False, 10)) for n in (12, 15)]
    assert _boxes(*calls)[2:] == ["Loader.next · loader.py"]


def test_two_functions_of_one_name_are_two_boxes() -> None:
    path = "/lib/python3.12/site-packages/data/loader.py"
    calls = [(LOAD, Frame(path, n, "<lambda>", "", False, n)) for n in (12, 15)]
    assert _boxes(*calls)[2:] == 2 * ["&lt;lambda&gt; · loader.py"]


def test_a_real_generator_is_one_box() -> None:
    """The sampler's own stacks of a generator that computes at two of its lines."""
    ended = threading.Event()

    def batches() -> Iterator[int]:
        while not ended.is_set():
            yield sum(range(20_000))
            sum(range(30_000))

    def consume() -> None:
        for _ in batches():
            pass

    reader = threading.Thread(target=consume, name="reader", daemon=True)
    reader.start()
    try:
        sampler = StackSampler(ThreadStacks(), 60.0, 500.0)
        until(lambda: len(_lines(sampler, "batches")) > 1, 30)
        seconds, looks, weights, _ = sampler.result()
    finally:
        ended.set()
        reader.join()
    seen = [one for one in weights if one[0].thread == "reader"]
    html = _html(Profile({0: Sampled(seconds, looks, seen)}))
    assert len(re.findall(r">[^<]*batches · test_profile_report.py<", html)) == 1


def _lines(sampler: StackSampler, function: str) -> set[int]:
    """Return the lines of a function that a sampler has seen so far."""
    return {
        frame.line
        for (_, key) in list(sampler._weights)
        for frame in sampler._look.resolve(key)
        if frame.function.endswith(function)
    }


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The saved picture in a browser."""
    path: Path = tmp_path_factory.mktemp("profile") / "profile.html"
    ProfileReport(_profile()).save(path)
    found = browser.new_page(viewport={"width": 900, "height": 400})
    found.goto(path.as_uri())
    yield found
    found.close()


def _share(page: Page, label: str) -> float:
    """Return the part of the picture that a call takes up; 0 if it is hidden."""
    box = page.locator(".node > button", has_text=label).first.bounding_box()
    whole = page.locator(".graph").bounding_box()
    assert whole is not None
    return 0.0 if box is None else box["width"] / whole["width"]


@pytest.mark.processes
def test_widths_are_seconds(page: Page) -> None:
    # 15.5 s of 20.
    assert _share(page, "dist.all_reduce") == pytest.approx(0.775, abs=0.01)
    assert _share(page, "x = load()") == pytest.approx(0.2, abs=0.01)


@pytest.mark.processes
def test_a_click_zooms_and_a_button_zooms_out(page: Page) -> None:
    page.locator(".node > button", has_text="x = load()").click()
    assert _share(page, "x = load()") == pytest.approx(1.0, abs=0.01)
    assert _share(page, "dist.all_reduce") == 0.0
    page.locator(".whole").click()
    assert _share(page, "dist.all_reduce") == pytest.approx(0.775, abs=0.01)
    assert page.locator(".whole").is_disabled()


@pytest.mark.processes
def test_a_rank_is_chosen(page: Page) -> None:
    page.locator("select").select_option(label="rank 0")
    assert _share(page, "x = load()") == pytest.approx(0.8, abs=0.01)
    page.locator("select").select_option(label="rank 2")
    assert _share(page, "x = load()") == 0.0
    page.locator("select").select_option(label="ranks 0–3")


@pytest.mark.processes
def test_a_call_says_how_long_each_rank_was_there(page: Page) -> None:
    button = page.locator(".node > button", has_text="time.sleep")
    button.hover()
    assert page.locator(".detail").inner_text() == (
        "20.0 % · cell 7 line 3 in load · time.sleep(1) · 4.0 s on rank 0"
    )
    title = page.locator(".node > button", has_text="all_reduce").last
    assert title.get_attribute("title") == (
        "all_reduce · Rankscope\n0.5 s on rank 0 · 5.0 s on ranks 1–3"
    )
    assert button.locator(".strip i").count() == 4
