"""Which models and versions are served."""
