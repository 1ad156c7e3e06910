"""Ranks as actors of Ray.

Each rank is an actor in a placement group. It is never restarted, and its calls are never retried: a rank that comes again would find no group. Its calls run in threads, so
that one call can end another. Ray itself ends all actors of a program that dies.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from oneaccord.api import Ask, Deadline, DeadlineError, UsageError, Worker, WorkerLost
from oneaccord_ray.config import RayConfig

__all__ = ["RayWorkers"]

# Ray's own way to show output takes lines that differ in a number alone for repetitions. It reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_LOOK_S = 0.5
"""How often a placement group that is not ready is asked whether it ever can be."""
_THREADS = 4
"""How many calls of an actor run at once: one of the user, and those that end it."""
_LONGEST_REASON = 400


class _Rank:
    """The actor of one rank."""

    def where(self) -> tuple[str, str]:
        """Return the node, and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def number(self, prefix: str) -> None:
        """Put the rank in front of each line of output."""
        sys.stdout, sys.stderr = _Prefixed(sys.stdout, prefix), _Prefixed(sys.stderr, prefix)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function of oneaccord."""
        return function(*args)


class _Prefixed:
    """A text stream that writes whole lines, each with its rank."""

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._held = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
            if lines:
                self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RayWorkers:
    """Actors of Ray, as a `oneaccord.api.WorkerLauncher`.

    Parameters
    ----------
    config
        How they are placed.
    """

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Make the placement group and the actors.

        Raises
        ------
        UsageError
            The cluster has not the resources, or ``per_host`` does not divide the ranks.
        DeadlineError
            They were not free in time.
        """
        config = self._config
        if not ray.is_initialized():
            ray.init(address=config.address, namespace=config.namespace, log_to_driver=True)
        each = ask.per_host or 1
        if ask.ranks % each:
            raise UsageError(f"per_host={each} does not divide {ask.ranks} ranks: Ray places whole hosts")
        needs = {"CPU": config.cpus, "GPU": float(ask.gpus), **config.resources}
        bundle = {name: amount * each for name, amount in needs.items() if amount}
        strategy = "STRICT_SPREAD" if ask.per_host else config.strategy
        try:
            self._group = placement_group([bundle or {"CPU": 0.001}] * (ask.ranks // each), strategy=strategy)
            self._wait(self._group, bundle, strategy, deadline)
            self._actors = [self._actor(index // each, ask) for index in range(ask.ranks)]
            found = ray.get([actor.where.remote() for actor in self._actors], timeout=max(1.0, deadline.remaining()))
        except ray.exceptions.GetTimeoutError:
            self.stop(())
            raise DeadlineError(
                f"Ray had not started {ask.ranks} actors within {deadline.timeout_s:g} s: look at `ray status`, or give more time"
            ) from None
        except BaseException:
            self.stop(())
            raise
        nodes = list(dict.fromkeys(node for node, _ in found))
        order = sorted(range(ask.ranks), key=lambda index: (nodes.index(found[index][0]), index))
        self._actors = [self._actors[index] for index in order]
        digits = len(str(ask.ranks - 1))
        for rank, actor in enumerate(self._actors):
            actor.number.remote(f"[{rank:>{digits}}] ")
        names = self._names()
        return [
            Worker(rank, names.get(found[index][0], found[index][0]), found[index][1], self._actors[rank])
            for rank, index in enumerate(order)
        ]

    def call(self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        """Run a function in an actor."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()

        def done(told: Future[Any]) -> None:
            try:
                answer.set_result(told.result())
            except RayTaskError as error:
                answer.set_exception(error.cause if isinstance(error.cause, BaseException) else error)
            except RayActorError as error:
                answer.set_exception(WorkerLost(_reason(error)))
            except BaseException as error:  # noqa: BLE001 - the driver deals with all
                answer.set_exception(error)

        worker.handle.call.remote(function, args).future().add_done_callback(done)
        return answer

    def stop(self, workers: Sequence[Worker]) -> None:
        """Kill the actors, and give the resources back."""
        del workers  # they are all there are
        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        if not ray.is_initialized():  # it has ended, and all actors with it
            return
        for actor in actors:
            with contextlib.suppress(Exception):  # it is dead
                ray.kill(actor, no_restart=True)
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster is gone
                remove_placement_group(group)

    def _actor(self, bundle: int, ask: Ask) -> Any:
        assert self._group is not None
        options = {
            "num_cpus": self._config.cpus,
            "num_gpus": ask.gpus,
            "resources": self._config.resources or None,
            "runtime_env": self._config.runtime_env or None,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _THREADS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        }
        return ray.remote(**options)(_Rank).remote()

    def _wait(self, group: PlacementGroup, bundle: dict[str, float], strategy: str, deadline: Deadline) -> None:
        ready = group.ready()
        while not ray.wait([ready], timeout=min(_LOOK_S, max(0.01, deadline.remaining())))[0]:
            state = placement_group_table(group).get("stats", {}).get("scheduling_state", "")
            wanted = f"{group.bundle_count} times {bundle} ({strategy})"
            nodes = [{name: node["Resources"].get(name, 0) for name in bundle} for node in ray.nodes() if node["Alive"]]
            there = ", ".join(map(str, nodes))
            if state == "INFEASIBLE":
                raise UsageError(
                    f"this Ray cluster can never place {wanted}: its nodes have {there}. Ask for fewer ranks, or for less for each (options cpus, resources, "
                    "strategy; gpus, per_host)"
                )
            if deadline.passed():
                raise DeadlineError(
                    f"Ray had not placed {wanted} within {deadline.timeout_s:g} s, because others use what its nodes have ({there}): look at `ray status`"
                )

    def _names(self) -> dict[str, str]:
        """Return the name of each node, with its address: several nodes of one host have one name."""
        return {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in ray.nodes()}


def _reason(error: RayActorError) -> str:
    """Return how an actor died, of the many lines that Ray writes."""
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line
        for line in words
        if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "The actor died"))
    ]
    return (" ".join(told or words) or "its actor died")[:_LONGEST_REASON]
