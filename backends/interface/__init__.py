"""The Backend base class, the registry of backends, and the fallbacks they share."""
