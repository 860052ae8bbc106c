"""Learns the doubly sparse layer and exports it as a bundle."""
