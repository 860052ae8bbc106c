"""One server process, or a supervisor with workers."""
