"""The conformance suite for authors of backends."""
