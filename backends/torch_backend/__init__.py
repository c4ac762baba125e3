"""A Rankscope group as a process group of torch: the backend ``rankscope``.

All its modules but that of the options import torch, and are imported where it is.
"""
