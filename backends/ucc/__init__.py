"""The UCC backend: the collectives of the library UCC, where one is installed."""
