"""Turns a trained layer into a bundle, and checks that both give the same answers."""
