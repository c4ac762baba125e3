"""``python -m rankscope``: the commands that need no notebook."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rankscope import __version__, doctor

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rankscope", description="Rankscope's command line."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor",
        help="tell what can be used here, and what to install for the rest",
        description=doctor.DESCRIPTION,
        epilog=doctor.EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
