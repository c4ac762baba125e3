"""The gloo backend: pygloo in a side process per rank and group."""
