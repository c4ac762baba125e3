"""What ranks write, as entries."""

from __future__ import annotations

import pytest

from rankscope.magics.output.parse import OutputParser

# As torch writes it where the connection to its store is closed.
STORE = """\
[rank0]:[W1125 11:31:15.482 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on
Exception raised from recvBytes at /torch/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error() + 0x9d (0x7fe2cc732b8d in /torch/libc10.so)
frame #1: <unknown function> + 0x674888d (0x7fe281b4888d in /torch/libtorch_cpu.so)
frame #12: /usr/bin/python() [0x584e93]
mine
"""


@pytest.mark.parametrize("size", [7, 10_000])
def test_the_frames_of_a_cpp_stack_are_left_out(size: int) -> None:
    parser = OutputParser([0], 1)
    entries = []
    for start in range(0, len(STORE), size):
        text = STORE[start : start + size]
        output = {"output_type": "stream", "name": "stderr", "text": text}
        entries += parser.feed(0, output)
    entries += parser.flush(0)
    assert "".join(f"{entry.content}\n" for entry in entries) == (
        "[rank0]:[W1125 11:31:15.482 TCPStore.cpp:138] [c10d] recvValueWithTimeout "
        "failed on\n"
        "Exception raised from recvBytes at /torch/c10d/Utils.hpp:787 (its C++ stack "
        "is left out)\n"
        "mine\n"
    )


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("\r  0%|   | 0/8\r 50%|#  | 4/8\r100%|###| 8/8\n", ["stdout"]),
        ("0it [00:00, ?it/s]\r12it [00:01, 9.92it/s]\n", ["stdout"]),
        ("a warning\n100%|###| 8/8\n", ["stderr", "stderr"]),
        # A message in the place of a bar, as tqdm.write writes it.
        ("\r 50%|#  | 4/8\r            \rno data\n", ["stderr"]),
        ("\r 50%|#  | 4/8\nValueError\n", ["stderr", "stderr"]),
    ],
)
def test_a_bar_is_no_error(text: str, kinds: list[str]) -> None:
    parser = OutputParser([0], 1)
    output = {"output_type": "stream", "name": "stderr", "text": text}
    assert [entry.kind for entry in parser.feed(0, output)] == kinds


def test_what_a_user_prints_is_shown_as_it_is() -> None:
    parser = OutputParser([0], 1)
    output = {"output_type": "stream", "name": "stdout", "text": STORE}
    assert [entry.content for entry in parser.feed(0, output)] == STORE.splitlines()
