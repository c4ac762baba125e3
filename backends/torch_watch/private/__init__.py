"""The private and undocumented names of torch that the watch uses."""
