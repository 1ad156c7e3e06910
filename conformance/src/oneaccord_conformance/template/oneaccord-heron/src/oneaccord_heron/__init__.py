"""The launcher heron of oneaccord."""
