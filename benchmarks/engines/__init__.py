"""Times top-k engines on one row or a batch, without HTTP."""
