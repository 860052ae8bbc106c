"""What the scenarios share: servers, load, checks of answers."""
