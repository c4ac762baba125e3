"""The notebook side: starting, watching, asking and repairing engines."""
