"""What a deployment needs; not installed with the package."""
