"""Queries a second against recall, for this engine and all others."""
