"""The tcp backend of oneaccord."""
