"""What runs inside each engine."""
