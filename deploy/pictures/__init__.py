"""Pictures for the docs."""
