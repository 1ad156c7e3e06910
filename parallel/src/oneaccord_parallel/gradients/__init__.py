"""Gradients of all ranks, averaged during the backward pass; and the first values, from one rank to all."""

from oneaccord_parallel.gradients.replicas import broadcast
from oneaccord_parallel.gradients.sync import GradientSync, Step
from oneaccord_parallel.gradients.uneven import until_all_done

__all__ = ["GradientSync", "Step", "broadcast", "until_all_done"]
