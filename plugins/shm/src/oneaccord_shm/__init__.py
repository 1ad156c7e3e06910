"""The shm backend of oneaccord."""
