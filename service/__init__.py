"""Serves bundles: never imports torch or trainer."""
