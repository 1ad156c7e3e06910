"""The events of a run, and a file of them that Perfetto shows."""
