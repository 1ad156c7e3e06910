"""manyhands as a backend of torch.distributed.

>>> import manyhands_torch
>>> torch.distributed.init_process_group("manyhands")
"""

from __future__ import annotations

from manyhands_torch.backend import Backend
from manyhands_torch.process_group import ProcessGroup
from manyhands_torch.registering import register
from manyhands_torch.work import Handle

__all__ = ["Backend", "Handle", "ProcessGroup", "register"]

register()
