"""Starting ranks from a program: on this host, or by the engine of a cluster."""
