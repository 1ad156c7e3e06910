"""Calls of functions on other ranks: services, replies and references."""

from oneaccord_parallel.rpc.errors import RemoteError
from oneaccord_parallel.rpc.references import Ref
from oneaccord_parallel.rpc.replies import Reply
from oneaccord_parallel.rpc.service import Service

__all__ = ["Ref", "RemoteError", "Reply", "Service"]
