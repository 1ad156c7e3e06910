"""The hybrid backend of oneaccord."""
