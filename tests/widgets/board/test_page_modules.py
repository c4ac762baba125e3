"""The modules of the board's page: each by itself, and put into one.

The tests of what they do are in JavaScript, in page/; each is one of pytest's here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.widgets.board.page import FOLDER, link, module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page, Route

_ROOT = Path(__file__).parents[3]
_TESTS = Path(__file__).parent / "page"
#: No server: the test answers for it, with files of the repository.
_HOST = "http://rankscope.test"

MODULES = sorted(path.name for path in FOLDER.glob("*.js"))
#: Each test of each file: ``("text.js", "ranks in a row are a range")``.
CASES = [
    (path.name, name)
    for path in sorted(_TESTS.glob("*.js"))
    for name in re.findall(r'^test\("([^"]+)"', path.read_text(encoding="utf-8"), re.M)
]


class TestLink:
    def test_a_module_is_behind_those_that_it_imports(self) -> None:
        linked = link(
            {
                "entry.js": 'import {\n  a,\n} from "./a.js";\nimport "./b.js";\n',
                "a.js": 'import * as b from "./b.js";\n// import "./c.js"\n',
                "b.js": 'const text = `from "./c.js"`;\n',
                "c.js": "",
            },
            "entry.js",
        )
        first, _ = linked.split("\n", 1)
        listed = json.loads(first.removeprefix("const modules = ").removesuffix(";"))
        assert [one[:2] for one in listed] == [
            ["b.js", []],
            ["a.js", ["b.js"]],
            ["entry.js", ["a.js", "b.js"]],
        ]

    def test_modules_that_need_each_other_are_refused(self) -> None:
        sources = {
            "entry.js": 'import "./a.js";',
            "a.js": 'import "./b.js";',
            "b.js": 'export { one } from "./a.js";',
        }
        with pytest.raises(ValueError, match=r"entry.js → a.js → b.js → a.js$"):
            link(sources, "entry.js")

    @pytest.mark.parametrize("name", ["./b.js", "a.js", "../a.js", "https://a/a.js"])
    def test_what_is_not_there_is_refused(self, name: str) -> None:
        sources = {"entry.js": f'import "{name}";', "a.js": ""}
        with pytest.raises(ValueError, match=f'entry.js imports "{name}"'):
            link(sources, "entry.js")

    def test_every_module_of_the_board_is_in(self) -> None:
        first, _ = module().split("\n", 1)
        listed = json.loads(first.removeprefix("const modules = ").removesuffix(";"))
        assert sorted(name for name, *_ in listed) == MODULES
        assert listed[-1][0] == "entry.js"


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page, for which the repository is the server."""
    found = browser.new_page()

    def answer(route: Route) -> None:
        path = _ROOT / route.request.url.removeprefix(f"{_HOST}/")
        if path.name == "empty.html":
            route.fulfill(body="<!doctype html>", content_type="text/html")
        elif path.is_file():
            route.fulfill(path=path, content_type="text/javascript")
        else:
            route.fulfill(status=404)

    found.route("**/*", answer)
    found.goto(f"{_HOST}/empty.html")
    yield found
    found.close()


@pytest.fixture(scope="module")
def outcomes(page: Page) -> dict[str, dict[str, str | None]]:
    """Run all tests; return file → name → what went wrong, if anything."""
    found: dict[str, dict[str, str | None]] = page.evaluate(
        """async (files) => {
          const { run } = await import("/tests/widgets/board/page/harness.js");
          const outcomes = {};
          for (const file of files) outcomes[file] = await run(`./${file}`);
          return outcomes;
        }""",
        sorted({file for file, _ in CASES}),
    )
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "name"), CASES, ids=[f"{file}: {name}" for file, name in CASES]
)
def test_in_the_page(
    outcomes: dict[str, dict[str, str | None]], file: str, name: str
) -> None:
    wrong = outcomes[file][name]
    assert wrong is None, wrong


@pytest.mark.processes
def test_every_test_of_the_page_is_collected(
    outcomes: dict[str, dict[str, str | None]],
) -> None:
    run = {(file, name) for file, found in outcomes.items() for name in found}
    assert run == set(CASES)


@pytest.mark.processes
def test_each_module_loads_by_itself(page: Page) -> None:
    loaded: dict[str, Any] = page.evaluate(
        """async (names) => {
          const found = {};
          for (const name of names) {
            const one = await import(`/widgets/board/page/${name}`);
            found[name] = Object.keys(one).length;
          }
          return found;
        }""",
        MODULES,
    )
    assert [name for name, exports in loaded.items() if not exports] == []


@pytest.mark.processes
def test_a_stack_trace_names_file_and_line(page: Page) -> None:
    source = link(
        {
            "entry.js": 'import { fail } from "./deep.js";\nexport default fail;\n',
            "deep.js": '\nexport function fail() {\n  throw new Error("deep");\n}\n',
        },
        "entry.js",
    )
    stack = page.evaluate(
        """async (source) => {
          const blob = new Blob([source], { type: "text/javascript" });
          const { default: fail } = await import(URL.createObjectURL(blob));
          try { fail(); } catch (error) { return error.stack; }
        }""",
        source,
    )
    assert "at fail (rankscope/board/deep.js:3:9)" in stack
