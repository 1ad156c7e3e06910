"""The shm backend of manyhands."""
