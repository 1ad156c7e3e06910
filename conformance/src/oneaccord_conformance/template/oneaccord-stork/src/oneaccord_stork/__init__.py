"""The launcher stork of oneaccord."""
