"""The report on a dead job as the output of a cell."""

from __future__ import annotations

import html

from rankscope.backends.post_mortem.report import Report

from .page import made_with, report_page

__all__ = ["ReportFrame"]

#: Pixels; the page scrolls.
HEIGHT = 560


class ReportFrame:
    """A report: the page in a frame where HTML is shown, else its text."""

    def __init__(self, report: Report, title: str) -> None:
        self._report, self._title = report, title

    def __str__(self) -> str:
        return f"files of {self._title}, no running ranks:\n{self._report.as_text()}"

    def _repr_html_(self) -> str:
        page = html.escape(report_page(self._report, self._title, made_with()))
        title = html.escape(f"report on the files of {self._title}")
        return (
            f'<iframe sandbox="allow-scripts" title="{title}" srcdoc="{page}" '
            f'style="width:100%;height:{HEIGHT}px;border:1px solid #8888"></iframe>'
        )

    __repr__ = __str__
