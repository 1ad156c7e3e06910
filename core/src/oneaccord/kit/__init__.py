"""What backends over a foreign library share: to find and load it, to move messages and to wait by it, and to end while it works.

Plugins import all of it from `oneaccord.api`. The backends mpi, gloo, ucx and ucc are made of it.
"""
