"""``make bench``: Rankscope against pygloo, torch.distributed and ipyparallel."""
