"""What makes torch know the backend."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from oneaccord_torch.joining import create, meet
from oneaccord_torch.objects import seal_objects
from oneaccord_torch.ranks import NAME, be_rank, within_world

__all__ = ["register"]


def register() -> None:
    """Register the backend with torch; calling it twice is fine.

    torch 2.14 and newer call it themselves when a program names the backend. Importing `oneaccord_torch` does, too.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        _rendezvous_handlers["env"] = meet
        for scheme, handler in list(_rendezvous_handlers.items()):
            _rendezvous_handlers[scheme] = within_world(handler)
        seal_objects()
    be_rank()
