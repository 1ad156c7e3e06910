"""Pure functions that return schedules.

Every algorithm is a function ``(rank, size, root=0, segments=1) -> Schedule`` that makes the schedule of one rank alone, in a
time that grows with its own steps only. ``registry`` lists them. The formulas in their docstrings count for one rank, where P
is the number of ranks, k the number of segments and n the bytes of the vector or of all blocks together; *steps* is the
number of messages on the longest chain in which each waits for the one before. All of them work in any world, for blocks
that differ in size or are empty, and in place.
"""
