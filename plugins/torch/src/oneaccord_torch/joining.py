"""How the ranks of a program of torch's find each other: the group of ours that is below a process group."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from oneaccord import Group, init
from oneaccord.api import Variable, current_rank
from oneaccord_torch.backend import Backend
from oneaccord_torch.objects import group_below
from oneaccord_torch.process_group import ProcessGroup
from oneaccord_torch.ranks import be_rank
from oneaccord_torch.stores import GroupStore

__all__ = ["create", "meet"]

_met: ContextVar[tuple[Group, GroupStore] | None] = ContextVar("oneaccord_torch_group", default=None)
"""The group of all ranks that `meet` has made, and torch's store, until a process group takes them."""
_torch_meets = _rendezvous_handlers["env"]


def create(opts: Any, _: object = None) -> Backend | ProcessGroup:
    """Make a process group, or what torch 2.14 and newer make one of, as torch asks a backend to.

    The group of all ranks is made by `oneaccord.init`, with the configuration that this finds. Where `meet` has not made it, torch's
    store tells the ranks where to meet, and the secret by which they know each other. Others are made of that one, if it is ours.
    """
    be_rank()
    ranks, timeout = list(opts.global_ranks_in_group), opts.timeout
    group: Group | None = None
    met = None
    if ranks:
        world = group_below(None)
        group = None if world is None else world.subgroup(ranks, timeout_s=timeout.total_seconds())
    elif (met := _met.get()) is not None:
        group, _ = met
        _met.set(None)
    if group is None:
        group = _by_store(opts.store, opts.group_rank, opts.group_size)
    made = ProcessGroup(group, opts.store, timeout) if torch.__version__ < (2, 14) else Backend(group, timeout)
    made.kept = met  # torch's C++ refers to the store, and does not keep what of it is Python
    return made


def meet(url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Read the rank of this process from its environment, as torch does for ``env://``, and return torch's store, rank and world size.

    If `oneaccord` knows more than torch, it does so: under ``oneaccord run``, and under launchers that do not set torch's variables. There
    the ranks meet first, and torch's store goes by the connections with which they know each other.
    """
    if _is_another(url) or ("RANK" in os.environ and Variable.LAUNCHED not in os.environ):
        yield from _torch_meets(url, timeout, **options)
        return
    group = init()
    store = GroupStore(group, timeout)
    _met.set((group, store))
    yield store, group.rank, group.world_size
    raise RuntimeError("these ranks have met already and cannot meet again: start a new job")


def _is_another(url: str) -> bool:
    """Return whether the program says that this process has another rank or world size than its launcher says, if that says any."""
    given = dict(parse_qsl(urlsplit(url).query))
    return any(name in given and given[name] != os.environ.get(name.upper()) for name in ("rank", "world_size"))


def _by_store(store: Any, rank: int, size: int) -> Group:
    if size == 1 or Variable.RENDEZVOUS in os.environ or current_rank() is not None:
        return init(rank=rank, world_size=size)
    if rank == 0:
        with socket.create_server((_host(store), 0)) as listener:
            host, port = listener.getsockname()[:2]
            own = os.environ.get(Variable.SECRET)  # which the other ranks have as well, and no other process may see
            secret = own or secrets.token_hex(32)
            store.set("oneaccord", f"{'' if own else secret} {host}:{port}")
            with _environment(
                ONEACCORD_RENDEZVOUS=f"{host}:{port}", ONEACCORD_SECRET=secret, ONEACCORD_RENDEZVOUS_FD=str(listener.fileno())
            ):
                group = init(rank=rank, world_size=size)
            store.delete_key("oneaccord")  # all have read it, and groups to come may have the same keys
            return group
    secret, _, address = store.get("oneaccord").decode().partition(" ")
    secret = secret or os.environ.get(Variable.SECRET, "")
    with _environment(ONEACCORD_RENDEZVOUS=address, ONEACCORD_SECRET=secret):
        return init(rank=rank, world_size=size)


def _host(store: Any) -> str:
    """Return where rank 0 can be reached: where torch's own store is, if it has a place."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "127.0.0.1")


@contextmanager
def _environment(**variables: str) -> Iterator[Mapping[str, str]]:
    """Set variables for as long as the context lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield os.environ
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
