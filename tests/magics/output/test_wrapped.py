from rankscope.magics.output.wrapped import WIDTH, wrapped


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
