"""What `parallel.py` measures."""
