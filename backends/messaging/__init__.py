"""Collectives as schedules of tagged messages over a transport: MPI, UCX."""
