"""The notebook side: starts and watches engines, sends requests, recovers ranks."""
