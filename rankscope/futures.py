"""Futures of ops, with the names of ``torch.futures``."""

from rankscope.backends.work.future import Future, collect_all, wait_all

__all__ = ["Future", "collect_all", "wait_all"]
