"""Long training runs that the docs quote."""
