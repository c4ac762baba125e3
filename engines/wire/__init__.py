"""The messages between notebook and engines, and the private names they need."""
