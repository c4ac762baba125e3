from rankscope.engines.errors import plain
from rankscope.magics.output.failures import CellError
from rankscope.magics.output.wrapped import WIDTH, fit, wrapped


def test_a_sentence_is_split_between_words_and_a_table_stays() -> None:
    table = "rank  late      by\n   0   3 of 59  14.6 ms"
    said = "late rank: rank 2 is last to enter all_reduce " + "cell 19 line 5 " * 8
    *first, second, third = wrapped(f"{table}\n{said}").splitlines()
    assert first == table.splitlines()
    assert f"{second} {third}" == said.strip()
    assert len(second) <= WIDTH


def test_no_line_ends_within_a_place() -> None:
    before = "x" * (WIDTH - 12)
    first, second = wrapped(f"{before} (cell 14 line 37) waits").splitlines()
    assert (first, second) == (before, "(cell 14 line 37) waits")


def test_a_rank_stands_with_its_number_and_an_op_with_its_own() -> None:
    before = "x" * (WIDTH - 6)
    for one in ("rank 17", "ranks 0–3", "all_reduce #22", "wait in it"):
        assert wrapped(f"{before} {one}: failed").splitlines()[0] == before


def test_lines_end_where_those_of_a_narrow_page_do() -> None:
    said = "rank 2 has not entered all_reduce #14 " * 20
    message = f"{said}\nWhy: it runs another cell\nNext: %dist_rebuild makes it usable"
    wide = CellError(message, {})._render_traceback_()
    fit(60)
    try:
        *lines, next_step = CellError(message, {})._render_traceback_()
        assert len(wrapped(said).splitlines()[0]) <= 60
    finally:
        fit(WIDTH)
    assert max(map(len, map(plain, lines))) <= 60
    # It says as much as a wide one.
    assert " ".join([*lines, next_step]) == " ".join(wide)
    assert next_step == wide[-1]
