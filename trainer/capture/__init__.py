"""Captures a trained model's hidden vectors, labels and head."""
