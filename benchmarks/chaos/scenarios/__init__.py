"""One way to abuse or to break a server a file, each with its criteria."""
