"""What core and its plugins promise each other: abstract classes, hooks, and the description of a backend."""
