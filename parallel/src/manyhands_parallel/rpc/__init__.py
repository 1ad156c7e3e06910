"""Calls of functions on other ranks: services, replies and references."""

from manyhands_parallel.rpc.errors import RemoteError
from manyhands_parallel.rpc.references import Ref
from manyhands_parallel.rpc.replies import Reply
from manyhands_parallel.rpc.service import Service

__all__ = ["Ref", "RemoteError", "Reply", "Service"]
