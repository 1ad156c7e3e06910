"""A backend of Ray Train: the workers of a trainer are the ranks of one group.

Rank 0 listens at a free port of its node. Its address and the secret of the job travel in Ray's own messages, and each worker keeps its seat in
memory: no variable of a process, no file and no command line has them. If Ray Train starts its workers anew, they get seats of a new job.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oneaccord.api import OneAccordError, Seat, UsageError, init

if TYPE_CHECKING:
    import ray
    from ray import train
    from ray.exceptions import GetTimeoutError, RayError

    from oneaccord.api import Group

    # Types are checked without Ray, too, and Ray's own classes have not all of theirs.
    class Backend:
        """Ray's."""

    class BackendConfig:
        """Ray's."""

    class DataParallelTrainer:
        """Ray's."""

        def __init__(self, *given: Any, **more: Any) -> None: ...
else:
    try:
        import ray
        from ray import train
        from ray.exceptions import GetTimeoutError, RayError
        from ray.train.backend import Backend, BackendConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError as error:
        raise ImportError(f'Ray Train cannot be imported ({error}): pip install "ray[train]"') from error

__all__ = ["OneaccordConfig", "OneaccordTrainer", "group"]

_CLOSE_S: Final = 2.0
"""How long the workers may wait for each other when they leave their group: all functions have returned, or the job has failed."""
_LEAVE_S: Final = 5.0
"""How long they may take in all, before Ray ends them."""


@dataclass
class OneaccordConfig(BackendConfig):
    """The backend of a trainer of Ray Train, for `OneaccordTrainer`, or as the ``backend_config`` of any other one.

    Parameters
    ----------
    backend
        The backend of oneaccord, as for `oneaccord.init`.
    config
        The configuration, as for `oneaccord.init`: a mapping, or the path of a file on the nodes.

    Raises
    ------
    UsageError
        A parameter is of another type.
    """

    backend: str | None = None
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        backend: Any = self.backend
        if backend is not None and not isinstance(backend, str):
            raise UsageError(f"backend must be the name of a backend of oneaccord, or None, not {backend!r}")
        if not isinstance(self.config, Mapping | str | os.PathLike | None):
            raise UsageError(f"config must be the path of a file, or a mapping, not {self.config!r}")

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls on its controller."""
        return _SeatsWorkers


class OneaccordTrainer(DataParallelTrainer):
    """A trainer of Ray Train (its version 2), whose workers are the ranks of one group: `oneaccord_ray.group`, in the training function.

    Parameters
    ----------
    train_loop_per_worker
        The training function.
    oneaccord_config
        The backend, and its configuration.
    **more
        As for any trainer of Ray Train: ``train_loop_config``, ``scaling_config``, ``run_config``, ``datasets`` and others.

    Examples
    --------
    >>> from ray.train import ScalingConfig  # doctest: +SKIP
    >>> OneaccordTrainer(function, scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()  # doctest: +SKIP
    """

    def __init__(
        self, train_loop_per_worker: Callable[..., Any], *, oneaccord_config: OneaccordConfig | None = None, **more: Any
    ) -> None:
        chosen: Any = oneaccord_config if oneaccord_config is not None else OneaccordConfig()
        if not isinstance(chosen, OneaccordConfig):
            raise UsageError(f"oneaccord_config must be a OneaccordConfig, or None, not {chosen!r}")
        super().__init__(train_loop_per_worker, backend_config=chosen, **more)


class _SeatsWorkers(Backend):
    """Gives each worker its seat before the training function begins."""

    def on_start(self, worker_group: Any, backend_config: OneaccordConfig) -> None:
        job, secret = secrets.token_hex(8), secrets.token_hex(32)
        address = worker_group.execute_single(0, _meet)
        worker_group.execute(_sit, address, secret, job, backend_config.backend, backend_config.config)

    def on_shutdown(self, worker_group: Any, backend_config: OneaccordConfig) -> None:
        del backend_config
        with contextlib.suppress(
            RayError, GetTimeoutError
        ):  # a worker has ended already, or its function goes on: Ray ends all of them next
            ray.get(worker_group.execute_async(_leave), timeout=_LEAVE_S)


class _Here:
    """What this worker keeps."""

    lock = threading.Lock()
    listener: socket.socket | None = None
    arguments: tuple[str, str, str, str | None, Any] | None = None
    group: Group | None = None


def group() -> Group:
    """Return the group of all workers of an `OneaccordTrainer`; the first call joins it.

    Each worker calls it, in the training function. As a context manager the group is closed at the end of the block, otherwise when the function
    has returned on all workers.

    Returns
    -------
    Group
        The same one each time. Its ranks are Ray Train's world ranks.

    Raises
    ------
    UsageError
        This process is no worker of such a trainer, or its training has ended.
    OneAccordError
        As for `oneaccord.init`.

    Examples
    --------
    >>> def function(config):
    ...     with oneaccord_ray.group() as group:
    ...         gradient = group.all_reduce(gradient, op="mean")
    """
    with _Here.lock:
        if _Here.group is None:
            if _Here.arguments is None:
                raise UsageError(
                    "this process has no seat: call oneaccord_ray.group() in the training function of an oneaccord_ray.OneaccordTrainer, or of "
                    "another trainer with backend_config=OneaccordConfig()"
                )
            address, secret, job, backend, config = _Here.arguments
            context = train.get_context()
            listener, _Here.listener = _Here.listener, None
            rank, size = context.get_world_rank(), context.get_world_size()
            seat = Seat(rank, size, address, secret, context.get_local_rank(), listener, job)
            _Here.group = init(backend, config=config, seat=seat)
        return _Here.group


def _meet() -> str:
    """Listen for the other workers at a free port of this node; return the address."""
    host = ray.util.get_node_ip_address()
    is_six = ":" in host
    _Here.listener = socket.create_server((host, 0), family=socket.AF_INET6 if is_six else socket.AF_INET, backlog=1024)
    port = _Here.listener.getsockname()[1]
    return f"[{host}]:{port}" if is_six else f"{host}:{port}"


def _sit(*arguments: Any) -> None:
    _Here.arguments = arguments


def _leave() -> None:
    """Close the group; after a failure its calls end as well."""
    with _Here.lock:
        here, _Here.group, _Here.arguments = _Here.group, None, None
    if here is not None:
        with contextlib.suppress(OneAccordError):  # it has failed
            here.close(timeout_s=_CLOSE_S)
