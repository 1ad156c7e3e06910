"""The nccl backend: it chooses this rank's GPU, compares what the ranks have, and opens channels."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oneaccord.api import (
    Backend,
    BackendUnavailableError,
    Bootstrap,
    ConfigError,
    Damaged,
    DeviceFailure,
    DeviceMeeting,
    Transport,
    UnsupportedError,
    read_cards,
    write_card,
)
from oneaccord_nccl import _cuda, _nccl
from oneaccord_nccl.channel import NcclChannel
from oneaccord_nccl.communicator import Communicator, destroy_revoked
from oneaccord_nccl.dtypes import Abilities, named
from oneaccord_nccl.plugin import NcclConfig

__all__ = ["NcclBackend", "create"]

_SHARING_VERSION = 23003
_SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
_INSTANCES_VERSION = 23100
"""NCCL 2.31 brought communicators of several MIG instances, as an experiment (its user guide, "Using MIG instances")."""
_SHARED_MAX_CTAS = 4
"""Kernels of NCCL wait for each other, so that those of all ranks must fit on a GPU at once."""

_set_here: set[str] = set()
"""What this process has set of the environment by itself, which is no consent of the user's."""


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank tells the others before they begin."""

    problem: str = ""
    version: int = 0
    device: int = 0
    bus_id: str = ""
    uuid: str = ""
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    may_share: bool = False
    max_ctas: int | None = None
    accumulate: str = ""


def create(bootstrap: Bootstrap) -> NcclBackend:
    """Return the backend of this rank.

    Raises
    ------
    BackendUnavailableError
        A rank has no NCCL, no GPU, or the GPU of another one; alike on all ranks.
    ConfigError
        The ranks have different ``max_ctas``, or ``accumulate``.
    """
    config = bootstrap.config
    assert isinstance(config, NcclConfig)
    loaded: tuple[_nccl.Library, _cuda.Cuda] | None = None
    try:
        loaded = _nccl.load(), _cuda.load()
        mine = _card(*loaded, config, bootstrap.local_rank)
    except (BackendUnavailableError, DeviceFailure) as error:
        mine = _Card(problem=str(error))
    cards = read_cards(bootstrap.exchange("nccl", write_card(mine)), _Card)
    _compare(cards, bootstrap.hosts)
    assert loaded is not None  # else there was a problem
    if _instances(cards, bootstrap.hosts) and _SHARING_SWITCH not in os.environ:
        # NCCL takes instances of one GPU for the same GPU, and refuses them without this (2.31.2, NVIDIA/nccl issue 1716; its guide says otherwise). It
        # reads the variable when the first communicator is made.
        os.environ[_SHARING_SWITCH] = "1"
        _set_here.add(_SHARING_SWITCH)
    max_ctas = config.max_ctas or (_SHARED_MAX_CTAS if _shared(cards, bootstrap.hosts) else None)
    capability = min((card.capability[0], card.capability[1]) for card in cards)
    accumulate = None if config.accumulate == "dtype" else np.dtype(config.accumulate)
    return NcclBackend(*loaded, mine.device, max_ctas, Abilities(mine.version, capability, accumulate))


def _card(library: _nccl.Library, cuda: _cuda.Cuda, config: NcclConfig, local_rank: int) -> _Card:
    count = cuda.count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = f"{count} GPU{'' if count == 1 else 's'}" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
    if not count:
        raise BackendUnavailableError(f"this process sees {seen}")
    may_share = library.version >= _SHARING_VERSION and os.environ.get(_SHARING_SWITCH) == "1"
    may_share = may_share and _SHARING_SWITCH not in _set_here
    if config.device is not None:
        if config.device >= count:
            raise BackendUnavailableError(
                f"backends.nccl.device is {config.device}, and this process sees {seen}, counted from 0"
            )
        device = config.device
    elif local_rank < count or may_share or count == 1:
        # A launcher may show each rank a GPU of its own, as number 0: whether it did is seen when the ranks compare.
        device = local_rank % count
    else:
        raise BackendUnavailableError(
            f"this process sees {seen}, and is number {local_rank} of the ranks of its host, counted from 0: start as many ranks on a host "
            "as it has GPUs, or show each rank its own by CUDA_VISIBLE_DEVICES" + _sharing_hint(library.version)
        )
    cuda.driver.context(device)  # a good part of a second, in which other threads run
    described = cuda.describe(device)
    return _Card(
        version=library.version,
        device=device,
        bus_id=described.bus_id,
        uuid=described.uuid,
        gpu=described.gpu,
        capability=described.capability,
        may_share=may_share,
        max_ctas=config.max_ctas,
        accumulate=config.accumulate,
    )


def _sharing_hint(version: int) -> str:
    if version < _SHARING_VERSION:
        return f"; several ranks on one GPU need NCCL 2.30.3 or newer, and the installed version is {named(version)}"
    return f"; several ranks on one GPU need {_SHARING_SWITCH}=1 in the environment of all ranks"


def _compare(cards: Sequence[_Card], hosts: Sequence[int]) -> None:
    for rank, card in enumerate(cards):
        if card.problem:
            raise BackendUnavailableError(f"rank {rank} cannot use NCCL: {card.problem}", peer=rank)
    for rank, card in enumerate(cards):
        if card.version != cards[0].version:
            raise BackendUnavailableError(
                f"rank 0 has NCCL {named(cards[0].version)} and rank {rank} has {named(card.version)}, and NCCL connects ranks of the same version only: "
                "install the same nvidia-nccl-cu12 or nvidia-nccl-cu13 for all ranks",
                peer=rank,
            )
        for name in ("max_ctas", "accumulate"):
            first, value = getattr(cards[0], name), getattr(card, name)
            if value != first:
                raise ConfigError(
                    f"backends.nccl.{name} is {first} on rank 0 and {value} on rank {rank}: set the same value on all ranks",
                    key=f"backends.nccl.{name}",
                    value=value,
                )
    for rank, first in _instances(cards, hosts).items():
        if cards[rank].version < _INSTANCES_VERSION:
            raise BackendUnavailableError(
                f"ranks {first} and {rank} have MIG instances of one GPU, {cards[rank].bus_id}, which NCCL connects only from 2.31 on; the installed version is "
                f"{named(cards[rank].version)}: install a newer nvidia-nccl-cu12 or nvidia-nccl-cu13, or give each rank a GPU of its own",
                peer=rank,
            )
    for rank, first in _shared(cards, hosts).items():
        if cards[rank].uuid != cards[rank].gpu and not cards[rank].may_share:
            raise BackendUnavailableError(
                f"ranks {first} and {rank} have the same MIG instance of GPU {cards[rank].bus_id}: a process sees one instance, the first that "
                "CUDA_VISIBLE_DEVICES names, so set that to another one for each rank, before it uses CUDA",
                peer=rank,
            )
        if not (cards[rank].may_share and cards[first].may_share):
            raise BackendUnavailableError(
                f"ranks {first} and {rank} have the same GPU, {cards[rank].bus_id}: start as many ranks on a host as it has GPUs, show each "
                "rank its own by CUDA_VISIBLE_DEVICES, or give each its number as backends.nccl.device"
                + _sharing_hint(cards[rank].version),
                peer=rank,
            )


def _shared(cards: Sequence[_Card], hosts: Sequence[int]) -> dict[int, int]:
    """Return the ranks whose device a rank before them has, with that rank."""
    return _repeated([(host, card.uuid) for host, card in zip(hosts, cards, strict=True)])


def _instances(cards: Sequence[_Card], hosts: Sequence[int]) -> dict[int, int]:
    """Return the ranks that have another MIG instance of the GPU of a rank before them, with that rank."""
    shared = _repeated([(host, card.gpu) for host, card in zip(hosts, cards, strict=True)])
    return {rank: first for rank, first in shared.items() if cards[rank].uuid != cards[first].uuid}


def _repeated(places: Sequence[tuple[int, str]]) -> dict[int, int]:
    """Return the positions of what came before, with the first of its kind."""
    owners: dict[tuple[int, str], int] = {}
    found = {position: owners.setdefault(place, position) for position, place in enumerate(places)}
    return {position: first for position, first in found.items() if first != position}


class NcclBackend(Backend):
    """NCCL between the GPUs of a job.

    Parameters
    ----------
    library, cuda
        NCCL and the CUDA runtime.
    device
        The number of this rank's GPU.
    max_ctas
        What its kernels may take of the GPU; None for NCCL's own choice.
    abilities
        What decides about reductions.
    """

    memory: frozenset[str] = frozenset({"cuda"})

    def __init__(
        self, library: _nccl.Library, cuda: _cuda.Cuda, device: int, max_ctas: int | None, abilities: Abilities
    ) -> None:
        self.device: int = device
        self._library = library
        self._cuda = cuda
        self._max_ctas = max_ctas
        self._abilities = abilities
        self._lock = threading.Lock()
        self._open: list[Communicator] = []
        self._ended = ""

    def open_transport(self, channel: int) -> Transport:
        """Refuse: there is no way for arrays of the host."""
        raise UnsupportedError(
            'the backend nccl moves GPU memory only; for host arrays, set backend = "hybrid" with '
            'routes = { cpu = "tcp", cuda = "nccl" }'
        )

    def open_device(self, channel: int, meeting: DeviceMeeting) -> NcclChannel:
        """Make a communicator with the other members, which meet by an id that the first of them makes."""
        unique_id = self._agree(channel, meeting)
        destroy_revoked()  # those of the job before: all members of this group are here, and have revoked theirs
        communicator = Communicator(self._library, self._cuda, self.device, meeting.deadline.timeout_s)
        with self._lock:
            if self._ended:
                raise DeviceFailure(f"{self._library.name}: {self._ended}")
            self._open = [one for one in self._open if not one.has_ended] + [communicator]
        communicator.connect(unique_id, len(meeting.ranks), meeting.rank, meeting.deadline, self._max_ctas)
        try:
            return NcclChannel(communicator, self._cuda, self.device, meeting.rank, self._abilities)
        except BaseException:
            communicator.abort("its channel did not open")
            raise

    def _agree(self, channel: int, meeting: DeviceMeeting) -> bytes:
        """Return the id; a failure to make it is everyone's."""
        mine = b""
        if meeting.rank == 0:
            try:
                with self._cuda.on(self.device):
                    mine = b"\0" + self._library.unique_id()
            except DeviceFailure as error:
                mine = b"\1" + error.reason.encode()
        card = meeting.exchange(f"nccl id {channel}", mine)[0]
        if card[:1] not in (b"\0", b"\1") or (card[:1] == b"\0" and not self._library.is_id(card[1:])):
            raise Damaged(0, f"expected an ncclUniqueId, but it sent {card[:16]!r}")
        if card[:1] == b"\1":
            raise DeviceFailure(card[1:].decode(errors="replace"), is_remote=meeting.rank != 0)
        return card[1:]

    def abort(self) -> None:
        """End all that is under way on this rank; returns at once."""
        self._end("the job was aborted")

    def close(self) -> None:
        """End what was left open; returns at once."""
        self._end("the backend was closed")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._ended = self._ended or reason
            for communicator in self._open:
                communicator.abort(reason)
            self._open = []
