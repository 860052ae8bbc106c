"""What surrounds every route: observation, authorization, headers for browsers."""
