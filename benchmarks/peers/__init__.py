"""Other servers giving the same answers; each runs in an environment of its own."""
