"""The ucc backend of oneaccord."""
