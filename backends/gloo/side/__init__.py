"""The code of the side process: standard library and pygloo, nothing else."""
