"""The machine underneath: CPUs, file descriptors, watched files."""
