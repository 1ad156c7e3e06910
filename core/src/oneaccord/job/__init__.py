"""A rank's place in its job."""
