"""The live board of ranks, groups and operations."""
