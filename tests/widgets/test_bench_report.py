"""The report of a benchmark: nccl-tests' table, plots, columns, CSV."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rankscope.engines import BenchRow
from rankscope.widgets import BenchReport
from tests.widgets.untrusted import words


def row(backend: str = "tcp", size: int = 1024, **changes: object) -> BenchRow:
    values = {
        "backend": backend,
        "op": "all_reduce",
        "ranks": 4,
        "size": size,
        "count": size // 4,
        "dtype": "float32",
        "time": 100.0 + size / 1e3,
        "time_min": 90.0,
        "time_max": 110.0,
        "algbw": size / 1e6,
        "busbw": size / 1e6 * 1.5,
        "wrong": 0,
        **changes,
    }
    return BenchRow(**values)  # type: ignore[arg-type]


REPORT = BenchReport(
    [row(name, 1 << power) for name in ("tcp", "mpi") for power in range(10, 22)]
)


def html(report: BenchReport) -> str:
    return report._repr_mimebundle_()["text/html"]


def plots(report: BenchReport) -> list[ElementTree.Element]:
    """The plots, parsed: what is not well-formed fails here."""
    found = html(report).split('<div class="plots">')[1].split("</div>")[0]
    return list(ElementTree.fromstring(f"<div>{found}</div>"))


def test_the_table_is_that_of_nccl_tests() -> None:
    lines = repr(BenchReport([row(), row(size=1 << 20, wrong=3)])).splitlines()
    assert lines[0] == "# all_reduce · 4 ranks"
    assert lines[1].split() == [
        "backend", "size", "count", "type", "time", "algbw", "busbw", "#wrong",
    ]  # fmt: skip
    assert lines[3].split() == [
        "tcp", "1024", "256", "float32", "101.0", "1.02", "MB/s", "1.54", "MB/s", "0",
    ]  # fmt: skip
    assert lines[4].split()[-1] == "3"


def test_small_arrays_have_a_bandwidth_in_a_unit_that_fits() -> None:
    shown = [
        repr(BenchReport([row(size=4, algbw=one, busbw=one)])).splitlines()[-1]
        for one in (40e-9, 3.2e-3, 12.0, 0.0)
    ]
    assert [line.split()[5:-1] for line in shown] == [
        ["0.04", "kB/s"] * 2, ["3.20", "MB/s"] * 2, ["12.0", "GB/s"] * 2, [],
    ]  # fmt: skip


def test_columns_rows_and_slices() -> None:
    assert isinstance(REPORT["busbw"], np.ndarray)
    assert list(REPORT["size"][:3]) == [1024, 2048, 4096]
    assert REPORT[0].backend == "tcp"
    assert isinstance(REPORT[:2], BenchReport)
    assert len(REPORT) == 24
    assert REPORT[0].count == 256
    with pytest.raises(KeyError, match="no column 'bus'; there are backend, op"):
        REPORT["bus"]


def test_csv(tmp_path: Path) -> None:
    REPORT.to_csv(tmp_path / "found.csv")
    with open(tmp_path / "found.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert list(rows[0]) == list(REPORT.columns)
    assert float(rows[5]["busbw"]) == REPORT[5].busbw


def test_a_line_for_each_backend_with_a_mark_of_its_own() -> None:
    for picture in plots(REPORT):
        lines = picture.findall("./g")
        assert len(lines) == 2
        assert [len(line.findall("g/title")) for line in lines] == [12, 12]
        assert lines[0].find("g/circle") is not None
        assert lines[1].find("g/rect") is not None


def test_both_axes_are_logarithmic_and_inside_the_picture() -> None:
    time, bandwidth = plots(REPORT)
    spots = [
        (float(mark.get("cx", "")), float(mark.get("cy", "")))
        for mark in bandwidth.findall("g/g/circle")
    ]
    steps = np.diff(np.array(spots), axis=0)
    # Twice the size is twice the bandwidth here: a straight line.
    assert np.allclose(steps, steps[0], atol=0.2)
    for picture in (time, bandwidth):
        for mark in picture.findall("g/g/circle"):
            assert 0 < float(mark.get("cx", "")) < 420
            assert 0 < float(mark.get("cy", "")) < 260


@pytest.mark.parametrize(
    "rows", [[row()], [row(time=100.0)], [row(busbw=0.0)], [row(time=1.0), row()]]
)
def test_little_to_plot(rows: list[BenchRow]) -> None:
    assert len(plots(BenchReport(rows))) == (1 if rows[0].busbw == 0 else 2)


def test_nothing_measured() -> None:
    assert BenchReport()._repr_mimebundle_() == {"text/plain": "nothing was measured"}


def test_names_are_text() -> None:
    shown = html(BenchReport([row("<script>x</script>")]))
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_a_page_that_is_not_trusted_has_the_table_alone() -> None:
    shown = words(html(REPORT))
    assert shown.startswith("all_reduce · ")
    assert "bus bandwidth" not in shown
    assert "#wrong" in shown
