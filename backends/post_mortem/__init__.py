"""Evidence of dead jobs: files that a job has left, read as plain data."""
