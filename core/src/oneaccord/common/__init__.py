"""Words, numbers and checks that all rooms use."""
