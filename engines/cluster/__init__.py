"""The notebook side: sends requests to engines, runs cells, recovers ranks."""
