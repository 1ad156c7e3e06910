"""One-sided calls: a rank reads and changes the memory of another one, which makes no call for it."""
