"""Everything on the screen: the board, the tables, a line of progress."""

from rankscope.backends.first_use import at_first_use, stubbed

# A terminal needs no widgets, whose import takes long.
__getattr__, __dir__, __all__ = at_first_use(__name__, stubbed(__file__))
