"""The gloo backend: gloo's library in a side process per rank and group."""
