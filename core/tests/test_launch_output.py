"""Output of several ranks: where lines begin and end, and when the beginning of one is shown."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.local.output import Screen, Stream, screens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random


class Terminal:
    """A screen whose bytes can be read back."""

    def __init__(self) -> None:
        self.screen = Screen()
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        self.fd = self._file.fileno()
        self._read = 0

    def stream(self, prefix: bytes = b"[0] ") -> Stream:
        return Stream(self.screen, self.fd, prefix, patience_s=1.0)

    def shown(self) -> bytes:
        """Return what was written since the last call."""
        data = os.pread(self.fd, 1 << 20, self._read)
        self._read += len(data)
        return data

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_a_line_waits_for_its_end(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"one\ntw")
    assert terminal.shown() == b"[0] one\n"
    assert stream.show_at is not None
    stream.feed(b"o\n")
    assert terminal.shown() == b"[0] two\n"
    assert stream.show_at is None


def test_a_carriage_return_ends_a_line_and_stays(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"10%\r20%\r")
    assert terminal.shown() == b"[0] 10%\r[0] 20%\r"
    stream.feed(b"done\n")
    assert terminal.shown() == b"[0] done\n"


def test_a_return_and_a_newline_are_one_end_even_when_they_come_apart(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"a\r\nb\r")
    stream.feed(b"\nc\n")
    assert terminal.shown() == b"[0] a\r\n[0] b\r\n[0] c\n"


def test_another_rank_does_not_write_over_a_progress_bar(terminal: Terminal) -> None:
    bar, other = terminal.stream(), terminal.stream(b"[1] ")
    bar.feed(b"10%\r")
    other.feed(b"hello\n")
    bar.feed(b"20%\r")
    assert terminal.shown() == b"[0] 10%\r\n[1] hello\n[0] 20%\r"


def test_a_beginning_that_waits_is_shown_and_goes_on_without_a_second_prefix(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"name? ")
    assert terminal.shown() == b""
    stream.show()
    assert terminal.shown() == b"[0] name? "
    stream.feed(b"thanks\nnext\n")
    assert terminal.shown() == b"thanks\n[0] next\n"


def test_a_beginning_that_is_shown_is_ended_before_another_rank_writes(terminal: Terminal) -> None:
    first, second = terminal.stream(), terminal.stream(b"[1] ")
    first.feed(b"loading")
    first.show()
    second.feed(b"hello\n")
    first.feed(b" done\n")
    assert terminal.shown() == b"[0] loading\n[1] hello\n[0]  done\n"


def test_a_very_long_line_is_not_held_in_memory(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"x" * 50_000)
    assert terminal.shown() == b""
    stream.feed(b"x" * 15_537)
    assert terminal.shown() == b"[0] " + b"x" * 65_537
    stream.feed(b"\n")
    assert terminal.shown() == b"\n"


def test_the_end_of_a_rank_ends_its_line(terminal: Terminal) -> None:
    stream = terminal.stream()
    stream.feed(b"half")
    stream.close()
    assert terminal.shown() == b"[0] half\n"


def test_the_tail_is_bounded(terminal: Terminal) -> None:
    stream = terminal.stream(b"")
    for number in range(5):
        stream.feed(bytes([48 + number]) * 20_000 + b"\n")
        terminal.shown()
    assert len(stream.tail) == 65_536
    assert stream.tail.endswith(b"4" * 20_000 + b"\n")


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\n\r"]), max_size=30), st.randoms(use_true_random=False))
def test_without_prefix_no_cut_changes_a_byte(words: list[bytes], random: Random) -> None:
    with closing(Terminal()) as terminal:
        stream = terminal.stream(b"")
        for part in cut(b"".join(words), random):
            stream.feed(part)
            if random.random() < 0.5:
                stream.show()
        stream.close()
        assert terminal.shown() == b"".join(words)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n"]), max_size=30), st.randoms(use_true_random=False))
def test_each_line_has_one_prefix_however_it_is_cut(words: list[bytes], random: Random) -> None:
    text = b"".join(words)
    with closing(Terminal()) as terminal:
        stream = terminal.stream(b"> ")
        for part in cut(text, random):
            stream.feed(part)
        stream.close()
        expected = b"".join(b"> " + line for line in text.splitlines(keepends=True))
        if text and not text.endswith(b"\n"):
            expected += b"\n"
        assert terminal.shown() == expected


def cut(text: bytes, random: Random) -> Iterator[bytes]:
    while text:
        at = random.randint(1, len(text))
        yield text[:at]
        text = text[at:]


def test_nobody_reading_is_noticed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    screen = Screen()
    Stream(screen, writer, b"", patience_s=1.0).feed(b"x\n")
    os.close(writer)
    assert screen.broken


def test_a_full_disk_is_told_on_the_other_output_and_ends_nothing(terminal: Terminal) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    out, err = screens(full, terminal.fd)
    stream, other = Stream(out, full, b"[0] ", 1.0), Stream(err, terminal.fd, b"[1] ", 1.0)
    other.feed(b"half")
    other.show()
    stream.feed(b"one\n")
    stream.feed(b"two\n")
    told = b"oneaccord run: standard output cannot be written (No space left on device): the job continues, but its output there is lost\n"
    assert terminal.shown() == b"[1] half\n" + told
    assert not out.broken
    reader, writer = os.pipe()
    os.dup2(writer, full)  # somebody has made room
    stream.feed(b"three\n")
    assert os.read(reader, 100) == b"\n[0] three\n"
    out.tell_of_lost()
    assert terminal.shown() == b"oneaccord run: 16 bytes of standard output were lost: No space left on device\n"
    for each in (full, reader, writer):
        os.close(each)


def test_a_full_disk_under_both_outputs_ends_nothing() -> None:
    full, copy = os.open("/dev/full", os.O_WRONLY), os.open("/dev/full", os.O_WRONLY)
    one, two = screens(full, copy)
    Stream(one, full, b"", 1.0).feed(b"x\n")
    Stream(two, copy, b"", 1.0).feed(b"y\n")
    one.tell_of_lost()
    assert (one.broken, two.broken, one.lost) == (False, False, 4)
    os.close(full)
    os.close(copy)


def test_two_outputs_share_a_screen_when_they_are_one_file(terminal: Terminal) -> None:
    copy = os.dup(terminal.fd)
    one, two = screens(terminal.fd, copy)
    assert one is two
    os.close(copy)
    reader, writer = os.pipe()
    one, two = screens(terminal.fd, writer)
    assert one is not two
    os.close(reader)
    os.close(writer)
