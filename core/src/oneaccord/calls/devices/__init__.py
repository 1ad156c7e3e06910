"""Calls on the memory of GPUs: agreed by all ranks, enqueued, looked after, and waited for."""
