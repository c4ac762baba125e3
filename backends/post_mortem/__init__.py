"""Evidence of dead jobs: files that a hung or ended job has left, read as plain data."""
