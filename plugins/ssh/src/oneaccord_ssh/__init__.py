"""A launcher of oneaccord for hosts that are reached by ssh."""
