"""Heads of real models with their hidden vectors, as capture folders; one file for each source."""
