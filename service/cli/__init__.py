"""The command `dss`."""
