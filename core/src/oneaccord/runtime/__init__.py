"""How ranks that are processes wait: the computer's clock, locks and threads."""
