"""The commands of `dss` that train, export and compare."""
