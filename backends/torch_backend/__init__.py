"""A Rankscope group as a process group of torch: the backend ``rankscope``.

Its modules import torch, so they are imported only where torch is.
"""
