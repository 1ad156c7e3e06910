"""GPUs that are made of threads and NumPy memory, for tests."""
