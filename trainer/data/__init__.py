"""Arrays and folders on disk."""
