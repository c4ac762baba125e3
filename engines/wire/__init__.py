"""What travels between notebook and engines, and the private names it needs."""
