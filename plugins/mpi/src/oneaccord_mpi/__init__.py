"""The mpi backend of oneaccord."""
