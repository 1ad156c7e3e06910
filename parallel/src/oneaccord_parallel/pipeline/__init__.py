"""Pipeline parallelism: the layers of a model lie on several ranks, through which the parts of a batch flow.

A `Plan` is plain data: the actions of each rank, in order. It is made by `schedule`, proved by `prove`, drawn by its methods, and carried
out by `Pipeline`.
"""
