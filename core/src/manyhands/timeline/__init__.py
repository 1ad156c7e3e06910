"""What happened when, as events, and as a file that Perfetto shows."""
