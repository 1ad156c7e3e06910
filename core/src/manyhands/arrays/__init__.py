"""From what users give to memory that can be sent, and back: dtypes, reductions, the libraries of arrays."""
