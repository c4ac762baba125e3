"""How the blocks of a page are read, run and compared."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.pages.blocks import blocks_in, matches
from tests.pages.reader import Reader

PAGE = """\
```{toctree}
install
```

```text
%%distributed
rank
```

```text
[0] 0
```

A verdict:

```text
rank 2 has not entered
```

```python
# train.py
print(1)
```

```bash
python train.py
```

<!-- in any order -->
```text
1
```

<!-- not run here: needs a GPU -->
```python
import cupy
```

```toml
[project]
```
"""


def test_each_block_has_a_kind() -> None:
    blocks = blocks_in(PAGE)
    assert [(block.line, block.kind) for block in blocks] == [
        (1, ""),
        (5, "cell"),
        (10, "output"),
        (16, ""),
        (20, "file"),
        (25, "commands"),
        (30, "output"),
        (35, "program"),
        (39, ""),
    ]
    assert blocks[4].file == "train.py"
    assert blocks[6].note == "in any order"
    assert [block.not_run for block in blocks if block.not_run] == ["needs a GPU"]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run here: no time -->\n```bash\ntrue\n```\n",
        "<!-- not run here: needs a GPU -->\n\nSee:\n\n```bash\ntrue\n```\n",
    ],
)
def test_a_note_has_a_known_reason_and_a_block(text: str) -> None:
    with pytest.raises(AssertionError):
        blocks_in(text)


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("4 ranks ready in 1.6 s", "starting\n4 ranks ready in 12 ms\n"),
        ("rank    pid\n   0  18362", "rank pid\n 0 18362"),
        ("cell 4 line 3 waits", "cell 17 line 3 waits"),
        ("a (pid 4711): …", "a (pid 1): it was killed"),
        ("first\n…\nlast", "first\nsecond\nthird\nlast"),
        ("", "anything"),
    ],
)
def test_what_differs_from_run_to_run_is_equal(expected: str, output: str) -> None:
    assert matches(expected, output)


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("4 ranks", "14 ranks"),
        ("4 ranks", "4 ranks are ready"),
        ("cell 4 line 3 waits", "cell 4 line 5 waits"),
        ("first\nlast", "last\nfirst"),
        ("array([10., 10.])", "array([10., 20.])"),
    ],
)
def test_all_else_is_not(expected: str, output: str) -> None:
    assert not matches(expected, output)


def test_lines_in_any_order() -> None:
    assert matches("a\nb", "b\na", in_any_order=True)
    assert not matches("a\nb", "b\nc", in_any_order=True)


def read(text: str, folder: Path) -> None:
    """Read a page that has no cells."""
    with Reader.of(blocks_in(dedent(text)), folder) as reader:
        reader.read()


@pytest.mark.processes
def test_commands_files_and_programs_are_run(tmp_path: Path) -> None:
    read(
        """\
        ```python
        # train.py
        import os
        begun = os.environ["RANK"]
        dist.destroy_process_group()
        ```

        ```bash
        make test              # printed, and not done
        test -s train.py
        echo 29500 > port; grep -q 29500 port
        ```

        ```console
        $ echo "took 3 ms"
        took 7 ms
        $ cat make.log | wc -l > lines
        ```

        <!-- continues train.py -->
        ```python
        print("rank", begun)
        class dist: destroy_process_group = print
        ```

        ```text
        rank 0
        ```
        """,
        tmp_path,
    )
    assert (tmp_path / "port").read_text() != "29500\n"
    assert int((tmp_path / "lines").read_text()) > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        "```bash\nfalse\n```\n",
        "```bash\nmake no-such-target\n```\n",
        "```bash\necho 1\n```\n\n```text\n2\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```python\nraise SystemExit(1)\n```\n",
        "```python\n# lost.py\n```\n",
        "<!-- from tests/pages/blocks.py -->\n```python\nno such line\n```\n",
    ],
)
def test_what_does_not_hold_fails(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        read(text, tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_cell_that_hangs_is_ended_from_the_page(tmp_path: Path) -> None:
    def page(said: str, ending: str) -> str:
        return f"""\
```text
%dist_init -n 2
```

<!-- hangs -->
```text
%%distributed
if rank == 0:
    dist.barrier()
```

```text
Next: group 'default' aborted: %dist_rebuild makes it usable
```

```bash
rankscope diagnose
```

```text
missing ranks: {said}; rank 0 waits …
```

```bash
rankscope abort
```

```text
%dist_rebuild
```

```text
{ending}
```
"""

    blocks = blocks_in(page("rank 1 has not entered …", "all groups rebuilt"))
    with Reader.of(blocks, tmp_path) as reader:
        reader.read()
    blocks = blocks_in("```text\n%dist_init -n 1 --backend no\n```\n")
    with Reader.of(blocks, tmp_path) as reader, pytest.raises(AssertionError):
        reader.read()
