"""The code that runs inside each engine."""
