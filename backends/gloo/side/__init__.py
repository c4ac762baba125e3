"""The code of the side process: the standard library and a library of gloo."""
