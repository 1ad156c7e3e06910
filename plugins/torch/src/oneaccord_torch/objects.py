"""What torch pickles and moves as tensors: the ranks unpickle only what one of them has sealed.

torch's process groups cannot tell pickles from other bytes, so the seals are put where torch makes and reads them. There are three such places.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from oneaccord import Group
from oneaccord.api import Sealer
from oneaccord_torch.calls import Calls

__all__ = ["group_below", "seal_objects"]

_PURPOSE = "a pickled object of torch's"


def group_below(process_group: Any) -> Group | None:
    """Return the group of ours that is below a process group, by default the one of all ranks; None if there is none."""
    given = process_group or distributed_c10d._get_default_group()
    if isinstance(given, Calls):
        return given.group
    for device in getattr(given, "_device_types", ()):  # torch hands over its own backends without a group around them, too
        with suppress(RuntimeError):  # no backend serves it
            if isinstance(ours := given._get_backend(device), Calls):
                return ours.group
    return None


def seal_objects() -> None:
    """Let torch unpickle nothing that comes over a group of ours without its seal."""
    distributed_c10d._object_to_tensor = _sealed(distributed_c10d._object_to_tensor)
    distributed_c10d._tensor_to_object = _unsealed(distributed_c10d._tensor_to_object)
    for name, change in _LATER.items():
        module = sys.modules.get(name)
        if module is not None:
            change(module)
    sys.meta_path.insert(0, _Finder())


def _sealer_of(process_group: Any) -> Sealer | None:
    group = group_below(process_group)
    return None if group is None else Sealer(group, _PURPOSE)


def _with_seal(sealer: Sealer, data: bytes) -> bytes:
    return data + sealer.of(data)


def _without_seal(sealer: Sealer, data: bytes) -> bytes:
    """Return what was sealed.

    Raises
    ------
    ProtocolError
        The seal is not that of the rest.
    """
    body, seal = data[: -Sealer.BYTES], data[-Sealer.BYTES :]
    sealer.check(body, seal)
    return body


# The collectives and messages of objects, on which distributed checkpoints, FSDP and others build


def _sealed(to_tensor: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    @wraps(to_tensor)
    def object_to_tensor(obj: Any, device: Any, group: Any) -> tuple[Any, Any]:
        tensor, size = to_tensor(obj, device, group)
        sealer = _sealer_of(group)
        if sealer is None:
            return tensor, size
        seal = torch.frombuffer(bytearray(sealer.of(tensor.cpu().numpy().data)), dtype=torch.uint8)
        return torch.cat([tensor, seal.to(tensor.device)]), size + Sealer.BYTES

    return object_to_tensor


def _unsealed(to_object: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to_object)
    def tensor_to_object(tensor: Any, tensor_size: Any, group: Any) -> Any:
        sealer = _sealer_of(group)
        if sealer is None:
            return to_object(tensor, tensor_size, group)
        body = _without_seal(sealer, tensor.cpu().numpy().tobytes()[: int(tensor_size)])
        return to_object(torch.frombuffer(bytearray(body), dtype=torch.uint8), len(body), group)

    return tensor_to_object


# What has functions of its own for that


def _seal_zero(module: Any) -> None:
    """Let ZeroRedundancyOptimizer gather its state by a collective of objects."""
    usual, cpu = module._broadcast_object, torch.device("cpu")

    @wraps(usual)
    def broadcast_object(obj: Any, src_rank: int, group: Any = dist.group.WORLD, device: Any = cpu) -> Any:
        if group_below(group) is None:
            return usual(obj, src_rank, group, device)
        saved = io.BytesIO()
        is_source = dist.get_rank() == src_rank
        if is_source:
            torch.save(obj, saved)
        data = [saved.getvalue()]
        dist.broadcast_object_list(data, src_rank, group, device)
        # Only what has passed the seal comes here.
        return obj if is_source else torch.load(io.BytesIO(data[0]), map_location=device, weights_only=False)

    module._broadcast_object = broadcast_object


_transport: ContextVar[Sealer | None] = ContextVar("oneaccord_torch_transport", default=None)


class _SealedPickles:
    """Stands for the module ``pickle`` in torch's transport of checkpoints, and seals while one runs over a group of ours."""

    @staticmethod
    def dumps(obj: Any) -> bytes:
        sealer, data = _transport.get(), pickle.dumps(obj)
        return data if sealer is None else _with_seal(sealer, data)

    @staticmethod
    def loads(data: bytes) -> Any:
        sealer = _transport.get()
        return pickle.loads(data if sealer is None else _without_seal(sealer, data))  # noqa: S301 - torch would do so without the seal


def _seal_transport(module: Any) -> None:
    """Let torch's transport of checkpoints by messages seal what it says of the tensors."""
    module.pickle = _SealedPickles
    for name in ("send_checkpoint", "recv_checkpoint"):
        setattr(module.PGTransport, name, _sealing_transport(getattr(module.PGTransport, name)))


def _sealing_transport(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def transport(self: Any, *arguments: Any, **named: Any) -> Any:
        with _transporting(_sealer_of(self._pg)):
            return method(self, *arguments, **named)

    return transport


@contextmanager
def _transporting(sealer: Sealer | None) -> Iterator[None]:
    token = _transport.set(sealer)
    try:
        yield
    finally:
        _transport.reset(token)


_LATER: dict[str, Callable[[Any], None]] = {
    "torch.distributed.optim.zero_redundancy_optimizer": _seal_zero,
    "torch.distributed.checkpoint._pg_transport": _seal_transport,
}
"""What is changed in modules that take seconds to import, and that few programs need: as soon as they are."""


class _Finder(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the usual spec of a module, whose loader then changes it."""
        change = _LATER.get(name)
        spec = None if change is None else PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # this module's own loader
        return spec
