"""The records between rank and side process, and the layout of eager buffers."""

from __future__ import annotations

import pytest

from rankscope.backends.gloo.side.wire import (
    COMMAND_BYTES,
    MESSAGE_BYTES,
    REPORT_BYTES,
    SIGNATURE_BYTES,
    Command,
    EagerLayout,
    Kind,
    Piece,
    Progress,
    Report,
    Status,
    Transfer,
    eager_bytes,
)

COMMAND = Command(Kind.REDUCE, 8, 3, -1, 1 << 40, 5, 6, 7, 8, 1 << 41, 1 << 42, 1 << 47)


def test_a_command_passes_as_it_is() -> None:
    message = COMMAND.pack()
    assert len(message) == COMMAND_BYTES
    assert Command.unpack(memoryview(message)) == COMMAND


def test_the_records_of_a_command_follow_it() -> None:
    transfers = [Transfer(2, 1, 1 << 33, 10, 2, 1 << 34, 20), Transfer(*range(7))]
    message = memoryview(COMMAND.pack(transfers))
    assert Command.unpack(message) == COMMAND
    assert Transfer.unpack_all(message) == transfers
    pieces = [Piece(1, 1 << 33, 5), Piece(2, 0, 1 << 34)]
    assert Piece.unpack_all(memoryview(COMMAND.pack(pieces))) == pieces


def test_a_thousand_transfers_fit_into_a_message() -> None:
    assert len(COMMAND.pack([Transfer(*range(7))] * 1000)) <= MESSAGE_BYTES


def test_a_report_passes_as_it_is() -> None:
    report = Report(1, 2, Status.SIZE_MISMATCH, -1, 1 << 62, 1 << 61, 1 << 40)
    message = bytearray(report.pack())
    assert len(message) == REPORT_BYTES
    assert Report.unpack(message) == report


def test_the_signature_holds_what_all_ranks_agree_on_and_nothing_else() -> None:
    def signature(command: Command) -> bytes:
        return command.pack()[:SIGNATURE_BYTES]

    own = {"number": 1, "segment": 1, "target": 1, "offset": 1, "extra": 1}
    assert signature(COMMAND._replace(**own)) == signature(COMMAND)
    for name in ("kind", "dtype", "reduction", "peer", "length", "sequence"):
        other = COMMAND._replace(**{name: getattr(COMMAND, name) + 1})
        assert signature(other) != signature(COMMAND), name


@pytest.mark.parametrize("size", [2, 3, 8, 32, 33])
def test_eager_buffers_do_not_overlap(size: int) -> None:
    layout = EagerLayout(size)
    regions = [
        (offset(size_class, index), nbytes)
        for size_class, nbytes in enumerate(layout.buffer_bytes)
        for index in range(EagerLayout.BUFFERS)
        for offset in (layout.buffer, layout.result)
    ]
    regions.sort()
    end = 0
    for start, nbytes in regions:
        assert start == end
        end = start + nbytes
    assert end == layout.nbytes or not regions
    assert all(nbytes <= eager_bytes(size) for nbytes in layout.capacities)
    assert bool(regions) == (size <= 32)


@pytest.mark.parametrize(
    ("size", "classes_kib", "shared_kib", "side_kib"),
    [
        (2, (4, 8, 16, 32, 64, 128, 256), 2032, 1016),
        (4, (4, 8, 16, 32, 64), 496, 496),
        (32, (4, 8), 48, 384),
        (33, (), 4, 0),
    ],
)
def test_the_figures_of_the_eager_buffers(
    size: int, classes_kib: tuple[int, ...], shared_kib: int, side_kib: int
) -> None:
    layout = EagerLayout(size)
    assert [nbytes >> 10 for nbytes in layout.capacities] == list(classes_kib)
    # Each buffer holds a command, too: less than a hundredth.
    assert shared_kib <= layout.nbytes >> 10 <= shared_kib * 1.03
    # One for each rank and size class (`_SizeClass`).
    assert side_kib <= size * sum(layout.buffer_bytes) >> 10 <= side_kib * 1.03


def test_the_progress_page_keeps_the_times_of_the_last_ops() -> None:
    page = bytearray(Progress.SIZE)
    side, rank = Progress(memoryview(page)), Progress(memoryview(page))
    assert (rank.last_started, rank.connected) == (0, False)
    side.connect()
    for number in range(1, 400):
        side.start(number, 1000 + number)
    assert (rank.last_started, rank.connected) == (399, True)
    assert rank.started_ns(399) == 1399
    assert rank.started_ns(200) == 1200
    assert rank.started_ns(100) == 0
