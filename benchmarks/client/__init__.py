"""Measures this project's Python client beside other clients and other HTTP libraries."""
