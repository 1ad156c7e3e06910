"""The seam to CUDA's driver by ctypes, above a library in C."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.fake_gpu import fake_cuda, fake_cupy, through_libcuda
from support.waiting import until

from oneaccord.api import DeviceFailure
from oneaccord_nccl import _driver
from oneaccord_nccl._driver import Driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of a machine with two GPUs."""
    fake_cupy.install(monkeypatch, 2)
    through_libcuda.install(monkeypatch)
    yield _driver.load()
    fake_cupy.shut_down()


def test_other_threads_run_while_the_driver_keeps_a_question_for_an_event(driver: Driver) -> None:
    library, answers = through_libcuda.library(), []
    driver.make_current(driver.context(1))
    event = driver.new_event()
    driver.record(event, 0)
    fake_cuda.event_synchronize(event)
    library.close_gate(1)
    try:
        asking = threading.Thread(target=lambda: answers.append(driver.is_past(event)))
        asking.start()
        until(lambda: library.count_waiting() == 1)
        assert driver.current() == driver.context(1)  # other calls of the driver do not wait for that one
    finally:
        library.close_gate(0)
    asking.join(20)
    assert answers == [True]


def test_a_thread_has_the_context_that_it_was_given(driver: Driver) -> None:
    seen = []

    def look() -> None:
        before = driver.current()
        driver.make_current(driver.context(1))
        seen.append((before, driver.current(), fake_cuda.get_device()))

    driver.make_current(driver.context(0))
    other = threading.Thread(target=look)
    other.start()
    other.join(20)
    assert seen == [(0, driver.context(1), 1)]
    assert (driver.current(), fake_cuda.get_device()) == (driver.context(0), 0)


def test_events_order_streams(driver: Driver) -> None:
    driver.make_current(driver.context(0))
    first, second = (fake_cuda.stream_create(is_blocking=False) for _ in range(2))
    event, order = driver.new_event(), []
    with fake_cuda.held(first):
        fake_cuda.enqueue(first, lambda: order.append("first"))
        driver.record(event, first)
        driver.wait(second, event)
        fake_cuda.enqueue(second, lambda: order.append("second"))
        assert not driver.is_past(event)
    fake_cuda.stream_synchronize(second)
    assert driver.is_past(event)
    assert order == ["first", "second"]
    driver.destroy_event(event)


def test_captures_are_seen(driver: Driver) -> None:
    driver.make_current(driver.context(0))
    stream = fake_cuda.stream_create()
    assert not driver.is_capturing(stream)
    fake_cuda.begin_capture(stream)
    assert driver.is_capturing(stream)
    assert driver.is_capturing(0)  # it may not be used meanwhile
    fake_cuda.end_capture(stream)
    assert not driver.is_capturing(0)


def test_the_mode_of_captures_is_exchanged(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    answer = through_libcuda._answer
    monkeypatch.setattr(
        through_libcuda,
        "_answer",
        lambda fake, name, words, count, made: seen.append((name, words[0])) or answer(fake, name, words, count, made),
    )
    driver.relax_capture()
    assert seen == [(b"cuThreadExchangeStreamCaptureMode", 2)]


def test_a_device_tells_itself_and_its_gpu_apart(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fake_cuda, "uuid", lambda device, *, is_whole=False: bytes([*range(0xF0, 0xFF), 0 if is_whole else device])
    )
    digits = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfe"
    assert driver.identity(1) == (f"{digits}01", f"{digits}00")


def test_what_the_driver_refuses_is_told_in_its_words(driver: Driver) -> None:
    with pytest.raises(DeviceFailure, match=r"^CUDA: CUDA_ERROR_INVALID_DEVICE: invalid device ordinal$"):
        driver.context(2)
