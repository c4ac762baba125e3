"""The names of this package and their modules, for type checkers and `__init__.py`."""

from .bench_report import BenchReport as BenchReport
from .board.widget import Board as Board
from .profile_report import ProfileReport as ProfileReport
from .progress import ProgressLine as ProgressLine
from .status_table import StatusTable as StatusTable
