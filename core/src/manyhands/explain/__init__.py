"""What the files of flight recorders say together: who waits for whom, what differs, and what happened when."""
