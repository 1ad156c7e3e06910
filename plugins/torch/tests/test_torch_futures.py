"""Futures of calls on tensors: on GPUs, which are stand-ins here, they know their devices and are done at the launch; on the CPU at the end."""

import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch deprecates what it uses itself
PATIENCE_S = 30.0


class Future:
    """Sees the devices, and runs what follows as torch's do: on streams of its own."""

    made: ClassVar = []

    def __init__(self, devices=()):
        self.devices = list(devices)
        self.callbacks = []
        self.ended = threading.Event()
        Future.made.append(self)

    def then(self, callback):
        child = Future(self.devices)
        self.callbacks.append((callback, child))
        return child

    def set_result(self, value):
        self.value = value
        Stream.current.name = "of the future"
        for callback, child in self.callbacks:
            child.set_result(callback(self))
        Stream.current.name = "of the thread"
        self.ended.set()


class Stream:
    """Notes what is done on it."""

    current = threading.local()
    log: ClassVar = []

    def __init__(self, device):
        self.device = device

    @property
    def name(self):
        return getattr(Stream.current, "name", "of the program")

    def record_event(self):
        Stream.log.append(("recorded", self.name, str(self.device)))
        return SimpleNamespace(device=self.device, wait=lambda stream: Stream.log.append(("waits", stream.name)))


@pytest.fixture
def work(monkeypatch):
    """The module, with a stand-in for torch's futures and streams."""
    import torch

    from oneaccord_torch import work

    Future.made, Stream.log = [], []
    monkeypatch.setattr(work, "Future", Future)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return work


@pytest.fixture
def call():
    """Return a call that has been launched, and that ends when it is told to."""
    from oneaccord.calls.order.turns import Turns
    from oneaccord.calls.work import Work

    class Launched(Work):
        def _finish(self, deadline):
            return "result" if self.is_on_gpu else super()._finish(deadline)

    made = Launched("all_to_all", Turns(), lambda: None)
    made.is_on_gpu = True
    return made


def tensors(*devices):
    import torch

    return [SimpleNamespace(device=torch.device(device)) for device in devices]


def test_a_future_of_tensors_on_gpus_has_their_devices_and_is_done_at_the_launch(work, call):
    outputs = [tensors("cuda:1", "cuda:0"), *tensors("cuda:1")]
    done = []
    handle = work.Handle([call], outputs, then=lambda results: done.append((results, Stream(0).name)))
    future = handle.get_future()
    assert future.ended.wait(PATIENCE_S)
    assert future.value is outputs
    assert not call.done()
    assert [[str(device) for device in each.devices] for each in Future.made] == [["cuda:1", "cuda:0"]] * 2
    assert done == [(["result"], "of the future")]
    # Whoever waits on another stream then waits for what was done on that one.
    handle.wait()
    assert Stream.log == [
        ("recorded", "of the future", "cuda:1"),
        ("recorded", "of the future", "cuda:0"),
        ("waits", "of the program"),
        ("waits", "of the program"),
    ]
    call.is_on_gpu = False
    call.run(lambda: None)


def test_a_future_of_tensors_of_the_cpu_has_no_devices_and_is_done_at_the_end(work, call):
    call.is_on_gpu = False
    outputs = tensors("cpu", "cpu")
    future = work.Handle([call], outputs).get_future()
    assert [each.devices for each in Future.made] == [[], []]
    assert not future.ended.is_set()
    call.run(lambda: "result")
    assert future.ended.wait(PATIENCE_S)
    assert future.value is outputs
    assert Stream.log == []
