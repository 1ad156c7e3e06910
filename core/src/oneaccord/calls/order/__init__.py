"""One call after the other: the order and the numbers of a group's calls."""
