"""The UCX backend, on the UCX library of the wheels ``libucx-cu12`` and ``-cu13``."""
