"""The HTTP API: routes, bodies, errors and access."""
