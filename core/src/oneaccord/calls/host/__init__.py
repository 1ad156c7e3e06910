"""Calls on memory of the host."""
