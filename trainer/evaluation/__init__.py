"""Accuracy, precision, FLOPs and time of a bundle. Needs no PyTorch."""
