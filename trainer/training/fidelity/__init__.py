"""Layers that give the head's own answers: its rows, placed in experts and found by a gate."""
