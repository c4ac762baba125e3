"""What ranks do: their status, stacks and records, and the verdicts over them."""
