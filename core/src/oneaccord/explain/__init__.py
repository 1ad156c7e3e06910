"""The story of a job from the files of its flight recorders: which rank waits for which, what differs, and what happened when."""
