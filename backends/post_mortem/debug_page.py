"""Pages of torch's debug server that a browser has saved: the answer of each rank."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace

from .evidence_file import EvidenceFile, RawFile

__all__ = ["answers_in"]

#: Bytes at the beginning in which the head of a page is looked for.
_BEGINNING = 1 << 16
_RANK = re.compile(rb"<h2>Rank (\d{1,6}): [^<]*</h2>")
_ANSWER = re.compile(rb"<pre[^>]*>(.*?)</pre>", re.DOTALL)


def answers_in(found: RawFile | EvidenceFile) -> Iterator[RawFile | EvidenceFile]:
    """Yield the answers of the ranks on a page, as files; another file as it is.

    They are dumps (``/fr_trace_json``) or stacks (``/stacks``, ``/pyspy_dump``).
    """
    if isinstance(found, EvidenceFile) or not _RANK.search(found.data[:_BEGINNING]):
        yield found
        return
    _, *parts = _RANK.split(found.data)
    for rank, part in zip(parts[::2], parts[1::2], strict=True):
        answer = _ANSWER.search(part)
        text = html.unescape(answer[1].decode(errors="replace")) if answer else ""
        path = f"{found.path}/rank_{rank.decode()}"
        yield replace(found, path=path, data=text.strip().encode())
