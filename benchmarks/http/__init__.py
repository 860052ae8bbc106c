"""Times servers over HTTP."""
