"""A rank of a plain script: what it publishes to notebooks that attach to its job."""
