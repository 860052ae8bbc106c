"""What worker processes have in common: counters, a table of workers, a folder."""
