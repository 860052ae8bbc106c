"""Abuse and faults against a real server, one scenario a file; `python -m benchmarks.chaos`."""
