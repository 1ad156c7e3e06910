"""Parameters, gradients and the state of optimizers that are divided among the ranks."""
