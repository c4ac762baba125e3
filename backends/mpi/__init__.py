"""The MPI backend, on mpi4py."""
