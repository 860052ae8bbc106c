"""Everything that numba compiles."""
