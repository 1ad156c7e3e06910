"""Pure functions that return schedules.

Every algorithm is a function ``(rank, size, root=0, segments=1) -> Schedule``, or ``(rank, size, root=0, segments=1,
ranks_per_host=1) -> Schedule``, that makes the schedule of one rank alone, in a time that grows only with its own steps.
Beside it is its formula, ``NAME_cost(size, nbytes, segments=1, ranks_per_host=1) -> Cost``. ``registry`` lists them.

In the docstrings P is the number of ranks, k the number of segments and n the bytes of the vector, of all blocks together,
or in all_to_all of the blocks that one rank sends. Messages and bytes count for one rank. Steps are those on the critical path
if a rank sends one message and receives one at a time (`Cost`). A proof counts fewer (`Report.steps`) if ranks would
gain from doing more at once. All algorithms work in any world and in place; those that are not ``even`` accept blocks that
differ in size or are empty.
"""
