"""The cluster: engines, the agent inside each, the control and status channel."""

from rankscope.backends.first_use import at_first_use, stubbed

# A script that is watched needs no ipyparallel, whose import takes a second.
__getattr__, __dir__, __all__ = at_first_use(__name__, stubbed(__file__))
