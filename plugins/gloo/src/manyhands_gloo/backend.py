"""The gloo backend: a process group of torch's, with a tag for each channel."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

from manyhands.api import (
    Backend,
    BackendUnavailableError,
    Bootstrap,
    CommError,
    ConfigError,
    Deadline,
    LinkLost,
    Transfer,
    Transport,
    UnsupportedError,
    read_cards,
    write_card,
)
from manyhands_gloo.meeting import make_store
from manyhands_gloo.plugin import GlooConfig
from manyhands_gloo.tensors import Tensors
from manyhands_gloo.transfers import Moving, Receiving, Sending, reason
from manyhands_gloo.waiters import Waiters

__all__ = ["GlooBackend", "GlooTransport", "current"]

_TAGS = 1 << 31
_UNLIMITED = timedelta(days=7)
"""What stands for no limit: the deadlines are manyhands', and a timeout of Gloo's breaks connections."""
_SLICE_S = 0.05
_FIRST_STALL_S = 0.4
_NEXT_STALL_S = 0.5
_LAST_WORDS_S = 0.5
"""How long threads may take to come back from broken connections."""
_VERDICT_S = 1.0
"""How long an error of Gloo waits for the job to learn what caused it, such as a rank that died."""

_backends: list[GlooBackend] = []


def current() -> GlooBackend | None:
    """Return the backend of this process that was made last and is open, None where there is none."""
    return _backends[-1] if _backends else None


class GlooBackend(Backend):
    """Gloo between the ranks of a job.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.

    Attributes
    ----------
    torch, distributed
        The modules.
    tensors
        Makes tensors over memory of NumPy.
    group
        The process group.
    ended
        Why nobody may wait any more; empty while all is well.

    Raises
    ------
    BackendUnavailableError
        torch has no Gloo, or Gloo cannot listen where it was told to.
    ConfigError
        The ranks have different ``[backends.gloo]``.
    DeadlineError
        Another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, GlooConfig)
        if bootstrap.shared is not None:
            raise BackendUnavailableError("the ranks of the gloo backend are processes, and these are threads of one process")
        self.config: GlooConfig = config
        self.rank: int = bootstrap.rank
        self.size: int = bootstrap.world_size
        self.ended: str = ""
        self._transports: set[GlooTransport] = set()
        self._held: dict[int, object] = {}
        self._broken_off = False
        self.waiters: Waiters = Waiters()
        self.torch: Any = importlib.import_module("torch")
        self.distributed: Any = importlib.import_module("torch.distributed")
        self.tensors: Tensors = Tensors(self.torch)
        if not self.distributed.is_available() or not self.distributed.is_gloo_available():
            raise BackendUnavailableError("this build of torch has no Gloo: pip install torch brings one that has")
        mine = {"native": config.native, "check": config.check, "torch": str(self.torch.__version__)}
        _compare(read_cards(bootstrap.exchange("gloo", write_card(mine)), dict[str, bool | str]))
        self.group: Any = self._join(bootstrap)
        _backends.append(self)

    def _join(self, bootstrap: Bootstrap) -> Any:
        gloo = self.distributed.ProcessGroupGloo
        where = {"interface": self.config.interface} if self.config.interface and not self.config.host else {}
        host = self.config.host or bootstrap.host
        try:
            device = gloo.create_device(**where) if where else gloo.create_device(hostname=host)
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"Gloo cannot listen at {self.config.interface if where else host!r}: {reason(error)}; give host or interface in "
                "[backends.gloo]"
            ) from error
        options = gloo._Options()
        options._devices = [device]
        options._timeout = _UNLIMITED
        options._threads = self.config.threads
        return gloo(make_store(bootstrap, self.distributed), self.rank, self.size, options)

    def open_transport(self, channel: int) -> GlooTransport:
        """Return the transport of a channel.

        Raises
        ------
        UnsupportedError
            Gloo has no tag for it.
        """
        if channel >= _TAGS - 1:
            raise UnsupportedError(f"Gloo has {_TAGS} tags, and this job has made as many groups: begin another job")
        transport = GlooTransport(self, channel)
        self._transports.add(transport)
        return transport

    def close_channel(self, transport: GlooTransport) -> None:
        """Forget a channel that no rank uses any more."""
        self._transports.discard(transport)

    def abort(self) -> None:
        """Wake every thread that waits for a message; who waits in a collective looks at `ended` again and again."""
        self._end("the job was aborted")
        if self._held and not self._broken_off:
            self._broken_off = True
            self.waiters.start(partial(self._break_off, self.group))

    def close(self) -> None:
        """Let go of the process group; where calls are still in it, it stays until the process ends."""
        self._end("the backend was closed")
        self.waiters.close(_LAST_WORDS_S if self._broken_off else 0.0)
        if self in _backends:
            _backends.remove(self)
            if self._held:
                # Its destructor would wait for threads that wait for ranks that are gone.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            self.group = None

    def _break_off(self, group: Any) -> None:
        """Break every connection: a wait that runs out of time does.

        Threads inside Gloo come back by that. Were they still there when the interpreter ends, they would take the process down.
        """
        with contextlib.suppress(RuntimeError):
            nothing = self.tensors.of_payload(bytearray(1))
            group.recv([nothing], (self.rank + 1) % self.size, _TAGS - 1).wait(timedelta(milliseconds=1))

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        for transport in list(self._transports):
            transport.tell()

    def check(self) -> None:
        """Raise `LinkLost` when the backend has ended."""
        if self.ended:
            raise LinkLost((self.rank + 1) % self.size, self.ended)

    def hold(self, what: object) -> None:
        """Keep memory that Gloo uses, until `release`: for ever where a call fails."""
        self._held[id(what)] = what

    def release(self, what: object) -> None:
        """Let go of memory that Gloo is done with."""
        self._held.pop(id(what), None)

    def wait(self, work: Any, deadline: Deadline, on_stall: Callable[[list[int]], None] | None) -> None:
        """Return when a collective of Gloo is done.

        Raises
        ------
        LinkLost
            The backend ended, or a connection broke because a rank was lost.
        CommError
            Gloo failed, and no rank was lost.
        TimeoutError
            The deadline passed; the collective goes on.
        """
        stall_at = time.monotonic() + _FIRST_STALL_S
        while True:
            try:
                work.wait(timedelta(seconds=max(0.001, min(_SLICE_S, deadline.remaining()))))
            except RuntimeError as error:
                if work.is_completed():
                    if work.is_success():
                        return  # it ended just after the slice had
                    raise self._broken(error) from error
            else:
                return
            self.check()
            if deadline.passed():
                raise TimeoutError("the deadline passed")
            if on_stall is not None and time.monotonic() >= stall_at:
                on_stall([rank for rank in range(self.size) if rank != self.rank])
                stall_at = time.monotonic() + _NEXT_STALL_S

    def _broken(self, error: Exception) -> Exception:
        """Return what to raise for an error of Gloo in a collective: no rank is to blame unless the job says so."""
        # A broken connection is only how a death shows itself here; the job knows within a moment who died.
        patience = Deadline(_VERDICT_S)
        while not self.ended and not patience.passed():
            time.sleep(0.005)
        if self.ended:
            return LinkLost((self.rank + 1) % self.size, f"{self.ended}; {reason(error)}")
        return CommError(f"Gloo failed: {reason(error)}", rank=self.rank)


def _compare(cards: list[dict[str, bool | str]]) -> None:
    for rank, card in enumerate(cards):
        for key, value in card.items():
            if value != cards[0].get(key):
                raise ConfigError(
                    f"{'torch' if key == 'torch' else f'backends.gloo.{key}'} is {cards[0].get(key)!r} on rank 0 and {value!r} on rank {rank}: all "
                    "ranks need the same",
                    key=f"backends.gloo.{key}",
                    value=value,
                )


class GlooTransport(Transport):
    """Messages of one channel."""

    def __init__(self, backend: GlooBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self._changed = threading.Condition()
        self.tensors: Tensors = backend.tensors

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Nothing to do: Gloo connects all ranks when it begins."""

    def close(self) -> None:
        """Forget this channel."""
        self._backend.close_channel(self)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        return self._begun(lambda: Sending(self, peer, header, payload), peer)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        return self._begun(lambda: Receiving(self, peer, header, payload), peer)

    def _begun(self, make: Callable[[], Moving], peer: int) -> Moving:
        try:
            transfer = make()
        except RuntimeError as error:
            raise LinkLost(peer, reason(error)) from None
        self._backend.hold(transfer)
        self._backend.waiters.start(transfer.run)
        return transfer

    def send_tensor(self, tensor: Any, peer: int) -> Any:
        """Start to send a tensor; return Gloo's handle."""
        return self._backend.group.send([tensor], peer, self._channel)

    def receive_tensor(self, tensor: Any, peer: int) -> Any:
        """Start to receive a tensor; return Gloo's handle."""
        return self._backend.group.recv([tensor], peer, self._channel)

    def finished(self, transfer: Moving) -> None:
        """Let go of the memory of a transfer that is done."""
        self._backend.release(transfer)

    def tell(self) -> None:
        """Wake whoever waits for a transfer."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait until a thread has moved a message to its end."""
        moving = cast("Sequence[Moving]", transfers)  # made by send and recv
        with self._changed:
            while True:
                failure = next((transfer.failure for transfer in moving if transfer.failure is not None), None)
                if failure is not None:
                    raise failure
                if any(transfer.done for transfer in moving):
                    return
                if self._backend.ended:
                    raise LinkLost(moving[0].peer, self._backend.ended)
                remaining = deadline.remaining()
                if not remaining:
                    raise TimeoutError("the deadline passed")
                self._changed.wait(remaining)
