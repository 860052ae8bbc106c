"""Who may do what: API keys, scopes and TLS."""
