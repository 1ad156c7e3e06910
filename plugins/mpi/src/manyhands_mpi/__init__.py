"""The mpi backend of manyhands."""
