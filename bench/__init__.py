"""``make bench``: Rankscope against gloo, torch.distributed and ipyparallel."""
