"""Ranks in the workers of a Dask cluster.

A rank is a thread of its own in a worker, not a task: Dask never runs it a second time, and no thread of the worker's pool waits for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from distributed import Client, get_client
from distributed.comm import CommClosedError

from oneaccord.api import Ask, Deadline, DeadlineError, Thread, UsageError, Worker, WorkerLost
from oneaccord_dask.config import DaskConfig
from oneaccord_dask.inside import answer, perform

__all__ = ["DaskLauncher", "client_of"]

T = TypeVar("T")

_POLL_S: Final = 0.2
_CONNECT_S: Final = 30.0
"""How long a scheduler may take to answer at first."""


class DaskLauncher:
    """A `oneaccord.api.WorkerLauncher` whose engine is Dask.

    Parameters
    ----------
    config
        The options.

    Raises
    ------
    UsageError
        There is no client, or it is an asynchronous one.
    """

    def __init__(self, config: DaskConfig) -> None:
        self._wanted = config.workers
        self._owns_client = config.client is None and config.address is not None
        self._address = config.address
        self._found = None if self._owns_client else client_of(config)
        self._name = secrets.token_hex(8)
        self._kept: Any = None

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Choose workers, at most one rank for each; wait for those that a cluster still starts."""
        if self._found is None:
            self._found = self._connect(deadline)
        while True:
            found = self._workers(ask)
            if len(found) >= ask.ranks:
                break
            if deadline.passed():
                raise DeadlineError(
                    f"the Dask cluster at {self._place} has {len(found)} suitable workers, and not the {ask.ranks} that were asked for, after "
                    f"{deadline.timeout_s:g} s: ask for fewer ranks, or scale the cluster"
                )
            time.sleep(min(_POLL_S, max(0.0, deadline.remaining())))
        chosen = found[: ask.ranks]
        self._check(chosen)
        # The scheduler drops these values from the workers when this program ends, in whatever way; the ranks look for theirs. Each worker has
        # one of its own, because Dask soon drops the copies of a value.
        self._kept = [self._client.scatter({self._token(address): True}, workers=[address]) for address, _ in chosen]
        return [Worker(index, host, host, address) for index, (address, host) in enumerate(chosen)]

    def call(self, worker: Worker, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        """Run a function in a worker, beside all that runs there."""
        future: Future[T] = Future()
        Thread(target=self._call, args=(future, worker, function, args), name="oneaccord-dask", daemon=True).start()
        return future

    def stop(self, workers: Sequence[Worker]) -> None:
        """Let go of the workers, which belong to the cluster and live on."""
        del workers
        self._kept = None
        if self._owns_client and self._found is not None:
            self._found.close()

    def _call(self, future: Future[T], worker: Worker, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            future.set_result(self._run(perform, [worker.handle], function, args, self._token(worker.handle))[worker.handle])
        except (OSError, CommClosedError) as error:
            future.set_exception(WorkerLost(f"the Dask worker {worker.handle} has ended ({type(error).__name__}: {error})"))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            future.set_exception(error)

    def _run(self, function: Callable[..., Any], workers: list[str], *args: Any) -> dict[str, Any]:
        answers: dict[str, Any] = self._client.run(function, *args, workers=workers)
        if missing := [address for address in workers if address not in answers]:
            raise ConnectionError(f"no answer of {', '.join(missing)}")
        return answers

    def _workers(self, ask: Ask) -> list[tuple[str, str]]:
        """Return the suitable workers and their hosts; those of one host are neighbours."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        if self._wanted:
            if len(self._wanted) != ask.ranks or len(set(self._wanted)) != ask.ranks:
                raise UsageError(
                    f"workers must name {ask.ranks} different workers, one for each rank, not {list(self._wanted)}"
                )
            if missing := [address for address in self._wanted if address not in known]:
                raise UsageError(f"the Dask cluster at {self._place} has no worker {missing[0]}; it has {sorted(known)}")
            order = list(self._wanted)
        else:
            order = sorted(known, key=lambda address: (_host_of(address), known[address].get("name") is None, address))
        found: list[tuple[str, str]] = []
        for address in order:
            host = _host_of(address)
            is_full = ask.per_host is not None and sum(each == host for _, each in found) >= ask.per_host
            gpus = (known[address].get("resources") or {}).get("GPU", 0)
            if not is_full and gpus >= ask.gpus:
                found.append((address, host))
        if ask.gpus and len(found) < ask.ranks <= len(known):
            raise UsageError(
                f"{ask.ranks} workers with {ask.gpus} GPUs each were asked for, but {len(found)} workers of the Dask cluster say that they have them: "
                'start workers with --resources "GPU=1" and CUDA_VISIBLE_DEVICES'
            )
        return found

    def _check(self, chosen: Sequence[tuple[str, str]]) -> None:
        """Raise unless oneaccord is installed where the workers run."""
        try:
            self._run(answer, [address for address, _ in chosen])
        except ImportError as error:
            raise UsageError(
                f'the Dask workers cannot import oneaccord ({error}): run pip install "oneaccord[dask]" where they run, in their environment'
            ) from error
        except OSError as error:
            raise WorkerLost(f"a Dask worker has ended ({error})") from error

    def _token(self, address: str) -> str:
        return f"oneaccord-{self._name}-{address}"

    def _connect(self, deadline: Deadline) -> Client:
        try:
            return Client(self._address, timeout=min(_CONNECT_S, max(_POLL_S, deadline.remaining())), set_as_default=False)
        except ValueError as error:
            raise UsageError(
                f'address must be that of a Dask scheduler, as "tcp://HOST:8786", not {self._address!r} ({error})'
            ) from error
        except OSError as error:
            raise DeadlineError(
                f"no Dask scheduler answers at {self._address} ({error}): is it running, and reachable from here?"
            ) from error

    @property
    def _client(self) -> Client:
        assert self._found is not None  # after `place`
        return self._found

    @property
    def _place(self) -> str:
        return str(self._client.scheduler.address)


def client_of(config: DaskConfig) -> Client:
    """Return the client that is configured, or the one that this process made last."""
    if config.client is not None:
        client = config.client
        if not isinstance(client, Client):
            raise UsageError(f"client must be a distributed.Client, not {client!r}")
    else:
        try:
            client = get_client()
        except ValueError as error:
            raise UsageError(
                'this program has no client of a Dask cluster: make one, as client = distributed.Client("tcp://HOST:8786"), or name the scheduler by '
                'options={"address": "tcp://HOST:8786"}'
            ) from error
    if client.asynchronous:
        raise UsageError("the client is asynchronous, but launch() blocks: give it one made by Client(..., asynchronous=False)")
    return client


def _host_of(address: str) -> str:
    return urlsplit(address).hostname or address
