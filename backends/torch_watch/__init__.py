"""The process groups of ``torch.distributed``, watched without a changed line."""
