"""Joins concurrent requests into engine calls, and refuses what would wait too long."""
