"""The nccl backend of oneaccord."""
