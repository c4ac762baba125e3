"""Look at processes that were not prepared: their jobs, ranks and stacks."""
