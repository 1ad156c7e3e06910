"""Activations and gradients on their way from one rank to another.

Shape and dtype travel with each array. The sender of an activation sends the number of its arrays, and their libraries, once in a step,
before the first of them. A gradient has as many arrays as the activation that it belongs to.

Arrays on a GPU go through host memory: on a GPU, the messages of a group go one after the other, so that two ranks that send to each
other would wait forever.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import UsageError
from oneaccord_parallel.arrays import readable, same_place
from oneaccord_parallel.pipeline.actions import Message

if TYPE_CHECKING:
    from oneaccord import Group, Work

__all__ = ["Mail"]

_LIBRARIES = ("numpy", "torch", "jax", "cupy")
_NONE = np.empty((0, 0, 0), np.bool_)
"""The dtype that means None: a gradient never has bools."""
_HOST = np.empty(0)

Form = tuple[int, ...]
"""Whether an activation is a tuple, and for each of its arrays the library, and whether it is on a GPU."""


class Mail:
    """The messages of one rank during a step.

    Parameters
    ----------
    group
        Its ranks are those of the plan.
    expected
        For each sender the messages from it, in order.
    timeout_s
        Seconds that each message may last, from its turn.
    """

    def __init__(self, group: Group, expected: dict[int, list[Message]], timeout_s: float | None) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._gpu = _gpu_of(group)
        self._ahead = {source: deque(messages) for source, messages in expected.items()}
        self._sent: list[Work[None]] = []
        self._headers: dict[int, Work[Any]] = {}
        self._arriving: dict[Message, list[Work[Any]]] = {}
        self._came: dict[int, Form] = {}  # the form of the input of a stage, by its number
        self._left: dict[int, Form] = {}  # the form of the output of a stage

    def issue(self, message: Message) -> None:
        """Issue the receives of a message, and of those before it from the same rank, as far as their forms are known."""
        self._issue(message, wait=False)

    def take(self, message: Message) -> Any:
        """Wait for a message, and return the activation or the gradient."""
        self._issue(message, wait=True)
        arrays = [work.wait() for work in self._arriving.pop(message)]
        if message.what == "activation":
            return self._joined(arrays, self._came[message.stage])
        form = self._left[message.stage]
        missing = [array.dtype == np.bool_ for array in arrays]
        return self._joined([None if none else array for none, array in zip(missing, arrays, strict=True)], form)

    def send(self, message: Message, value: Any) -> None:
        """Begin to send an activation or a gradient."""
        if message.what == "activation":
            self._send_activation(message, value)
            return
        arrays = _parts(value)
        form = self._came[message.stage + 1]
        if len(arrays) != len(form) - 1:
            raise UsageError(
                f"backward of stage {message.stage + 1} returned a gradient of {len(arrays)} arrays, and its forward got {len(form) - 1}: as "
                "many are expected, None for those without a gradient"
            )
        for array in arrays:
            self._send(_NONE if array is None else array, message.dest)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work in self._sent:
            work.wait()

    def _send_activation(self, message: Message, value: Any) -> None:
        arrays = _parts(value)
        form = (int(isinstance(value, tuple | list)), *map(_kind, arrays))
        stage = message.stage - 1
        if stage not in self._left:
            self._left[stage] = form
            self._send(np.array(form), message.dest)
        elif form != self._left[stage]:
            raise UsageError(
                f"forward of stage {stage} returned {_described(form)} for microbatch {message.microbatch}, and "
                f"{_described(self._left[stage])} before; shapes may differ, but not this"
            )
        for array in arrays:
            self._send(array, message.dest)

    def _send(self, array: Any, dest: int) -> None:
        self._sent.append(self._group.send_async(_on_host(array), dest, timeout_s=self._timeout_s))

    def _issue(self, message: Message, *, wait: bool) -> None:
        ahead = self._ahead[message.source]
        while message not in self._arriving and ahead:
            form = self._form_of(ahead[0], wait=wait)
            if form is None:
                return
            first = ahead.popleft()
            self._arriving[first] = [self._receive(first.source) for _ in form[1:]]

    def _form_of(self, message: Message, *, wait: bool) -> Form | None:
        """Return the form of a message; None if that is not known yet."""
        stage = message.stage
        if message.what == "gradient":
            return self._left.get(stage)
        if stage not in self._came:
            if stage not in self._headers:
                self._headers[stage] = self._receive(message.source)
            if not wait:
                return None
            self._came[stage] = tuple(map(int, self._headers.pop(stage).wait()))
        return self._came[stage]

    def _receive(self, source: int) -> Work[Any]:
        return self._group.recv_async(source, timeout_s=self._timeout_s)

    def _joined(self, arrays: list[Any], form: Form) -> Any:
        made = [None if array is None else _made(array, kind, self._gpu) for array, kind in zip(arrays, form[1:], strict=True)]
        return tuple(made) if form[0] else made[0]


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _kind(array: Any) -> int:
    """Return the library of an array, and whether it is on a GPU, as one number."""
    name = type(array).__module__.partition(".")[0].removesuffix("lib")
    library = _LIBRARIES.index(name) if name in _LIBRARIES else 0
    return 2 * library + (not same_place(array, _HOST))


def _described(form: Form) -> str:
    names = [_LIBRARIES[kind // 2] + (" on a GPU" if kind % 2 else "") for kind in form[1:]]
    return f"a tuple of {len(names)} arrays ({', '.join(names)})" if form[0] else f"an array of {names[0]}"


def _on_host(array: Any) -> Any:
    array = readable(array)
    if same_place(array, _HOST):
        return array
    return array.cpu() if hasattr(array, "cpu") else array.get()


def _gpu_of(group: Group) -> int | None:
    """Return the number of the GPU that the group uses; None if it uses none, so that the current one of each library is meant."""
    devices = (getattr(backend, "device", None) for backend in (group.backend(), group.backend("nccl")))
    return next((device for device in devices if isinstance(device, int)), None)


def _made(array: Any, kind: int, gpu: int | None) -> Any:
    """Return an array of NumPy as one of the sender's library, on a GPU if it was."""
    library, on_gpu = _LIBRARIES[kind // 2], kind % 2
    if library == "torch":
        import torch

        # By its bytes, since NumPy's bfloat16 is no dtype that torch knows.
        tensor = torch.from_numpy(array.reshape(-1).view(np.uint8)).view(getattr(torch, str(array.dtype))).reshape(array.shape)
        return tensor.cuda(gpu) if on_gpu else tensor
    if library == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(gpu):
            return cupy.asarray(array)
    return array
