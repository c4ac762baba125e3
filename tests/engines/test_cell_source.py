"""How ranks name cells, of which several notebooks may have sent one of a number."""

from __future__ import annotations

from types import SimpleNamespace

from rankscope.backends.observe.stacks import Frame
from rankscope.engines.agent.printing import CellSource
from rankscope.engines.observe.profiling import line_name


class Compiler:
    """Names files by their code, as ipykernel does."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        return f"/tmp/{raw_code}.py"

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        number = self.numbers.get(name)
        return None if number is None else ("Cell", f"In[{number}]")


def test_a_cell_whose_number_another_notebook_has_sent_since_is_an_earlier_one() -> (
    None
):
    compiler = Compiler()
    source = CellSource(SimpleNamespace(compile=compiler))

    def run(code: str, number: int, sender: str) -> str:
        source.note(code, number, sender)
        file = compiler.get_code_name(code, code, number)
        compiler.numbers[file] = number
        return file

    first = run("def f", 5, "one")
    assert source.describe(first, 2) == "cell 5 line 2"
    # A cell that runs several magics has one number.
    again = run("f()", 5, "one")
    assert [source.cell_of(file) for file in (first, again)] == ["cell 5"] * 2
    other = run("f(1)", 5, "two")
    run("1", 6, "two")
    assert source.describe(other, 1) == "cell 5 line 1"
    assert source.describe(first, 2) == "cell 5 (earlier) line 2"
    frame = Frame(str(source.name_of(first)), 2, "f", "", internal=False)
    assert line_name(frame) == "cell 5 (earlier) line 2"
    run("2", 7, "one")
    assert source.senders == {"two": "5-6", "one": "7"}
    # The same code, sent by the other notebook, is its cell.
    assert source.describe(run("def f", 5, "two"), 2) == "cell 5 line 2"
    assert source.cell_of("train.py") is None
