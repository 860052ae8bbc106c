"""Requests that cost more than they seem to, beside ordinary traffic; one kind a file."""
