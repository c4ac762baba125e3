"""Running cells on ranks, watching them and ending their waits."""
