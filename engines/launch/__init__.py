"""Starting and ending a controller and ranks: on this host, by ssh, Slurm, MPI."""
