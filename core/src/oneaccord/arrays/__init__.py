"""From users' values to memory that can be sent, and back: dtypes, reductions, the libraries of arrays."""
