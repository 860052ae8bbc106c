"""The routes that are not inference: models, operations, the explorer page and its data."""
