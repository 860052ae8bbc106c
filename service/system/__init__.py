"""The machine underneath: CPUs, memory, file descriptors, watched files."""
