"""oneaccord as a backend of torch.distributed.

>>> import oneaccord_torch
>>> torch.distributed.init_process_group("oneaccord")
"""

from __future__ import annotations

from oneaccord_torch.backend import Backend
from oneaccord_torch.process_group import ProcessGroup
from oneaccord_torch.registering import register
from oneaccord_torch.work import Handle

__all__ = ["Backend", "Handle", "ProcessGroup", "register"]

register()
