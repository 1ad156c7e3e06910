"""The ucx backend of oneaccord."""
