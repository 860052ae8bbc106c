"""Learns the layer."""
