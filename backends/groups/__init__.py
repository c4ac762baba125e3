"""Process groups: configuration, life cycle, dispatch and the functions on them."""
