"""A launcher of oneaccord for Kubernetes."""
