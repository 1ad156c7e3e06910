"""The contract between core and plugins: every hook, and the promises of its caller.

A plugin is a module, or any other object, whose functions are marked with `hookimpl` and named as below. Hooks register
and observe; the classes that they name do the work. No hook is called per message.

A plugin is found by an entry point of one of two groups:

``oneaccord``
    Backends. The entry's name is the backend's name and its value a light module; the module is imported only when that
    backend, or a list of the backends that can run here, is needed.
``oneaccord.extensions``
    Algorithms, observers and native collectives that are no backend's own. The modules are imported when the first
    collective needs to know about them.

Both kinds of module may implement any of these hooks. They import `oneaccord.api` alone from this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneaccord.contract.backend import BackendSpec, CollectiveRequest, NativeCollective
    from oneaccord.contract.observe import OperationEvent
    from oneaccord.schedule.algorithms.registry import Algorithm

__all__ = [
    "PROJECT",
    "hookimpl",
    "hookspec",
    "oneaccord_collective",
    "oneaccord_collective_finished",
    "oneaccord_collective_started",
    "oneaccord_register_algorithms",
    "oneaccord_register_backends",
]

PROJECT: Final[str] = "oneaccord"
"""The name that ties `hookspec` and `hookimpl` to oneaccord' own plugin manager."""

hookspec: Final[pluggy.HookspecMarker] = pluggy.HookspecMarker(PROJECT)
"""Marks a function of this module as a hook."""

hookimpl: Final[pluggy.HookimplMarker] = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as an implementation of the hook of that name."""

# A body-less hook returns nothing; its type is that of the implementation's result. `Any` lets both checkers accept that.
_SPEC: Any = None


@hookspec
def oneaccord_register_backends() -> BackendSpec | Sequence[BackendSpec]:
    """Describe the backends of this plugin.

    Called at most once in a process, in any thread, when the backend or a list of all backends is needed; before anything is
    imported that the backend needs, and whether or not it can run here. An implementation must be quick, must not import CuPy, mpi4py or
    torch, and must not touch a device or a socket. Later, `BackendSpec.probe` says whether the backend can run, and
    `BackendSpec.factory` is imported when it runs.

    Returns
    -------
    BackendSpec or sequence of BackendSpec
        One of them must bear the name of the entry point that led here. The others of an entry point's module do not count; those of an
        extension all do.

    Notes
    -----
    An exception here, a result of another type, or a spec with a wrong field is a `PluginError` for a caller that needs the backend, and
    a sentence in ``oneaccord doctor``. Other backends are not affected, and ``auto`` passes over this one.
    """
    return _SPEC  # type: ignore[no-any-return]


@hookspec(firstresult=True)
def oneaccord_collective(request: CollectiveRequest) -> NativeCollective | None:  # noqa: ARG001 - plugins use it
    """Offer to perform a collective natively, instead of the engine running a schedule.

    Called once per kind of call and group, in the thread that makes the call; the group remembers the answer, also when it is None. Plugins are
    called from the last registered to the first, whatever backend the group has, and the first offer serves all later calls of that
    kind. Look at ``request.backend`` first.

    Every rank decides for itself. An implementation must therefore use only ``request``, never the rank, the time or
    free memory, so that all ranks decide alike. It must not block: other ranks may be in the call already.

    Parameters
    ----------
    request
        The backend, the collective, the device, dtype, reduction, size in bytes and world size.

    Returns
    -------
    NativeCollective or None
        A callable that performs the collective, or None to leave it to others.

    Notes
    -----
    An exception here, or a result that cannot be called, ends the call with `PluginError` on the rank where it was raised, and the job on the
    others: core cannot skip the plugin, because other ranks may already rely on its collective.
    """
    return _SPEC  # type: ignore[no-any-return]


@hookspec
def oneaccord_register_algorithms() -> Sequence[Algorithm]:
    """Add algorithms, which the config may then choose by name.

    Called once in a process, in any thread, when a job begins. An algorithm must be pure: the same arguments give the same schedule on every
    rank. Each is proved for some small worlds, together with its claims. A wrong one is refused, and choosing it raises an error with the
    counterexample. A call in another world proves it there first, and raises `PluginError` on every rank if it is wrong. If a
    world is too large for a proof, the log says so. All ranks of a job need the same plugins.

    Returns
    -------
    sequence of Algorithm
        The name of each must be new for its collective.

    Notes
    -----
    An exception here is logged once and shown by ``oneaccord doctor``, and the plugin's algorithms are missing; to choose one of them is then
    an error.
    """
    return _SPEC  # type: ignore[no-any-return]


@hookspec
def oneaccord_collective_started(event: OperationEvent) -> None:
    """See a collective start, or a call that sends or receives, on the thread that runs it: that of the caller, or one of core's for a call in the background.

    Called once per call of this rank, of all groups, never per message of a collective, and not for a look that does not wait (``iprobe``,
    ``take_now``); at the same time in several threads if groups, or ranks that are threads, work at once. The operation waits for the observer: it must be quick, and it must not call a group.

    Parameters
    ----------
    event
        ``finished_ns`` and ``error`` are None.

    Notes
    -----
    The return value is not used. An exception here is logged once per observer and hook, and never breaks the operation or another observer.
    """


@hookspec
def oneaccord_collective_finished(event: OperationEvent) -> None:
    """See a collective end, well or badly, on the thread that ran it. Once for each `oneaccord_collective_started`.

    A request with a tag, such as ``send_async(x, 1, tag=0)``, starts on the thread that makes it, and ends on the one that finds its end, before
    any ``wait()`` for it returns.

    Parameters
    ----------
    event
        ``finished_ns`` is set; ``error`` is the exception that the caller is about to get, or None.

    Notes
    -----
    As for `oneaccord_collective_started`.
    """
