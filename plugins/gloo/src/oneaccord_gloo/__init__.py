"""The gloo backend of oneaccord."""
