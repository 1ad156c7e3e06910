"""Give every reader of bytes and texts what nobody wrote: it returns what they mean or raises its typed error, and nothing else.

Two engines try each reader: hypothesis changes what is valid, here and there, and atheris, where it is installed, goes by the branches that it reaches. Each
reader runs in a process of its own, since atheris ends the one that it runs in. Input that fails is written to a file, and the command that tries it again is
printed.

Usage: PYTHONPATH=tests python tests/campaigns/campaign_fuzz.py [--runs N] [--readers name,name] [--engines hypothesis,atheris] [--minutes M] [--input FILE]

``--runs`` holds for each reader and engine. ``--minutes`` is shared by all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from support import forged_checkpoints
from support.membership_tools import Job, progress, recv

from oneaccord.calls.messages.point_to_point import OPENING_BYTES, TAG_BYTES, DescriptionMismatch, Incoming, Kinds
from oneaccord.calls.request import ARRAY
from oneaccord.common.units import parse_bytes
from oneaccord.config.select import read_table
from oneaccord.config.sources import read_environment, read_file
from oneaccord.contract import header as wire
from oneaccord.contract.backend import HEADER_BYTES, Damaged
from oneaccord.contract.cards import read_cards, write_card
from oneaccord.contract.seal import Seal
from oneaccord.control import protocol as messages
from oneaccord.errors import ConfigError, OutOfMemoryError, RendezvousError, UsageError
from oneaccord.explain import reading
from oneaccord.explain.dump import FORMAT, Call, Dump, Place, decode
from oneaccord.explain.story import tell
from oneaccord.explain.timeline import timeline
from oneaccord.group.packing import Unpacker, pack
from oneaccord.job import error_file
from oneaccord.launchers import discover, parse_address
from oneaccord.launchers.hosts import expand_hostlist, hosts_of_lsf, tasks_of_node
from oneaccord.net.frames import FrameConnection
from oneaccord.net.handshake import (
    CLIENT_BYTES,
    GREETING_BYTES,
    KNOCK_BYTES,
    REPLY_BYTES,
    ClientHandshake,
    ServerHandshake,
    is_knock,
)
from oneaccord.schedule.simulation import Network
from oneaccord_parallel.checkpoint import metadata, storage
from oneaccord_parallel.checkpoint.errors import CheckpointError
from oneaccord_parallel.checkpoint.safetensors import read_header
from oneaccord_parallel.rpc import packing
from oneaccord_simulated.faults import FaultPlan

__all__ = ["READERS", "Reader", "damaged"]

_FIRST_HOSTS: Final = 100
_BATCH: Final = 500


class Reader(NamedTuple):
    """What is given to one reader, and what takes it in: it returns, or the reader is wrong."""

    valid: Sequence[bytes]
    read: Callable[[bytes], object]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _from_rank(data: bytes) -> None:
    message = messages.decode_from_rank(data)
    if message is None or isinstance(message, messages.Join):
        return
    job = Job()
    job.store.handle(1, message)
    job.pass_time(10)
    if [rank for rank in messages.ranks_in(message) if not 0 <= rank < 3]:
        verdicts = [each for heard in job.sent.values() for each in heard if isinstance(each, messages.Verdict)]
        assert {(verdict.kind, verdict.peer) for verdict in verdicts} == {("protocol", 1)}


def _join(data: bytes) -> None:
    message = messages.decode_from_rank(data)
    if isinstance(message, messages.Join) and 0 <= message.rank < 3:
        Job(joined=False).store.join(message)


def _from_store(data: bytes) -> None:
    message = messages.decode_from_store(data)
    assert message is None or isinstance(list(messages.ranks_in(message)), list)


def _sealed(frames: Sequence[bytes]) -> bytes:
    seal, data = Seal(bytes(32)), b""
    for frame in frames:
        length = len(frame).to_bytes(4, "little")
        data += length + seal.of(length) + frame + seal.of(frame)
    return data


def _frames(data: bytes) -> None:
    """What is not what was sent is told as None, and nothing comes after it."""
    got: list[bytes | None] = []
    pieces = [data[:30], data[30:]]
    sock = SimpleNamespace(
        seals=(Seal(bytes(32)), Seal(bytes(32))),
        recv=lambda _: pieces.pop(0) if pieces else b"",
        shutdown=id,
        close=lambda: None,
    )
    loop = SimpleNamespace(
        call=lambda call: call(), watch=lambda *_: None, call_later=lambda *_: None, forget=id, runs_here=True
    )
    limits = SimpleNamespace(bound=id)
    connection = FrameConnection(loop, sock, got.append, id, 1000, limits)  # type: ignore[arg-type]
    for _ in range(3):
        if connection._open:
            connection._read()
    sound = got[:-1] if None in got else got
    assert sound == list(_SENT[: len(sound)])
    assert got.count(None) <= 1


def _card(data: bytes) -> None:
    kinds: list[Any] = [list[tuple[int, str]], dict[str, bytes], tuple[int | None, int]]
    for kind in kinds:
        with suppress(Damaged):
            (card,) = read_cards([data], kind)
            msgspec.convert(msgspec.to_builtins(card), kind)


def _object(data: bytes) -> None:
    kinds: list[Any] = [None, dict[str, int], set[int]]
    for kind in kinds:
        with suppress(UsageError):
            Unpacker(kind, "recv_object").unpack(data, 1)


def _header(data: bytes) -> None:
    header = wire.parse_header(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    assert header is None or header.describe()


def _opening(data: bytes) -> None:
    for out in (None, np.zeros(3)):
        incoming = Incoming(1, 0, 0, out, ARRAY, Kinds())
        with suppress(DescriptionMismatch, Damaged, OutOfMemoryError):
            incoming.opened(memoryview(bytearray((bytes(TAG_BYTES) + data).ljust(OPENING_BYTES, b"\0")[:OPENING_BYTES])))
            assert incoming.array is not None
            assert not incoming.array.dtype.hasobject


def _handshake(data: bytes) -> None:
    """Nobody who does not hold the secret is let in, by either side."""
    assert not is_knock(b"secret", data[:KNOCK_BYTES].ljust(KNOCK_BYTES, b"\0"))
    _, hello = ServerHandshake(b"secret").answer(data[:CLIENT_BYTES].ljust(CLIENT_BYTES, b"\0"))
    client = ClientHandshake(b"secret", b"hello")
    client.answer(data[:GREETING_BYTES].ljust(GREETING_BYTES, b"\0"))
    assert hello is None
    assert not client.accepts(data[:REPLY_BYTES].ljust(REPLY_BYTES, b"\0"))


def _record(data: bytes) -> None:
    """What `oneaccord explain` reads, and what it says of it."""
    dump = decode(data)
    if dump is not None:
        job = reading.Job(dump.job, dump.world_size, {dump.rank: dump})
        assert tell(job)
        json.loads(timeline(job)[0])


@cache
def _place(name: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="fuzz-"), name)
    path.touch()
    return path


@contextmanager
def _file(name: str, data: bytes) -> Iterator[Path]:
    """Give a file that reads as these bytes, while this lasts: most of the time would go to writing and opening it."""
    kept = Path.read_bytes, Path.read_text
    given = (lambda _: data), (lambda _, encoding: io.TextIOWrapper(io.BytesIO(data), encoding).read())
    try:
        for function, instead in zip(kept, given, strict=True):
            setattr(Path, function.__name__, instead)
        yield _place(name)
    finally:
        for function in kept:
            setattr(Path, function.__name__, function)


def _error_file(data: bytes) -> None:
    with _file("error.json", data) as path:
        record = error_file.read(path)
    assert record is None or (type(record.rank), type(record.message), type(record.secondary)) == (int, str, bool)


def _toml(data: bytes) -> None:
    with _file("oneaccord.toml", data) as path:
        readers: list[Any] = [read_file, read_table]
        for read in readers:
            with suppress(ConfigError):
                read(path)


def _network(data: bytes) -> None:
    """The files of simulated worlds."""
    with _file("network.toml", data) as path:
        readers: list[Any] = [Network.load, FaultPlan.load]
        for read in readers:
            with suppress(ConfigError):
                read(path)


_home = tempfile.TemporaryDirectory(prefix="fuzz-")
_SAVED = Path(_home.name, "c")
forged_checkpoints.save_some(_SAVED)


def _checkpoint(data: bytes) -> None:
    """Whatever its checksum, which is put right. Each element that is loaded comes from a file."""
    head = metadata._HEAD.match(data)
    if head is not None and int(head[1]) == 1:
        data = forged_checkpoints.sealed(data[head.end() :])
    with patch.object(storage, "read_metadata", lambda _: data):
        forged_checkpoints.look(_SAVED, data)
    with suppress(CheckpointError):
        metadata.parse(data, "file", metadata.Stamp)


def _safetensors(data: bytes) -> None:
    for given in (data, len(data).to_bytes(8, "little") + data):
        with suppress(CheckpointError):
            start, tensors = read_header(io.BytesIO(given), len(given), "file")
            assert all(0 <= tensor.start <= tensor.stop <= len(given) - start for tensor in tensors)


def _rpc(data: bytes) -> None:
    kinds: list[Any] = [None, dict[str, int], np.ndarray]
    for kind in kinds:
        with suppress(UsageError):
            packing.unpack(packing.decoder(kind), data, [np.zeros(64, np.uint8)], "it")


def _address(data: bytes) -> None:
    with suppress(ConfigError):
        host, port = parse_address(_text(data))
        assert host
        assert 0 < port < 1 << 16


def _hosts(data: bytes) -> None:
    text = _text(data)
    with suppress(ConfigError):
        for number, _ in enumerate(expand_hostlist(text)):
            if number > _FIRST_HOSTS:  # a list may be as long as the numbers in it say
                break
    with suppress(ConfigError):
        tasks_of_node(text, 1)
    with suppress(ConfigError):
        hosts_of_lsf(text)


def _variables(data: bytes) -> None:
    """What launchers say, one variable in each line."""
    lines = [line.partition("=") for line in _text(data).replace("\0", "").splitlines()]
    environ = {name: value for name, _, value in lines if name}
    with suppress(ConfigError, RendezvousError):
        discover(environ)
    leaves, problems = read_environment(
        {f"ONEACCORD_{name}": value for name, value in environ.items()}, ["timeout_s"], ["backends"]
    )
    assert len(leaves) + len(problems) <= len(environ)


def _size(data: bytes) -> None:
    with suppress(UsageError):
        assert parse_bytes(_text(data)) >= 0


def _dump(**more: Any) -> bytes:
    wait = messages.Wait(0, 3, "all_reduce", b"12345678", [1], [], [0, 1, 2])
    calls = [
        Call(0, 2, "barrier", "barrier()", 1.0, 2.0, digest=b"ab"),
        Call(0, 3, "all_reduce", "all_reduce(float32[4])", 2.5, None, 7, "a.py:3", 16, wait, b"12345678", "float32", (4,)),
        Call(1, 1, "recv", "recv from rank 1", 3.0, wait=messages.Wait(1, 1, "recv", b"", [1], [(1, False, 0)], [0, 1])),
    ]
    dump = Dump(
        FORMAT, "ab", 0, 3, 0, "host", 1, "clock", 9.0, 99.0, "failed", messages.Verdict("lost", "x", 1), "", {0: (0, 1, 2)}, progress(), calls,
        [Place(7, "MainThread", "a.py:3")],
    )  # fmt: skip
    return msgspec.json.encode(msgspec.structs.replace(dump, **more))


_RECORD = {"rank": 1, "type": "ValueError", "message": "m", "traceback": "t", "time": 1.5, "secondary": False}
_JOIN = messages.Join(1, 3, "tcp", "", "1", "little", "host", 1)
_JOIN_AGAIN = msgspec.structs.replace(
    _JOIN, verdict=messages.Verdict("lost", "x", 0), place=messages.Whereabouts("host", 1, 2, "boot")
)
_FROM_RANK: list[Any] = [
    messages.Exchange("split #1", b"card", [0, 1, 2]),
    recv(2),
    messages.Report("mismatch", "text", 1, "barrier", 0, 3, [0, 1, 2]),
    messages.Testimony(1, True, "barrier() #1", 2),
    messages.Leave(progress()),
    messages.LeaveGroup(1, [0, 1], progress()),
    messages.Checkpoint("calls", 64, b"digest", [0, 1, 2]),
    messages.Shrink("host", 1234),
    messages.GiveUp(1.5),
    messages.JobReformed([0, 2]),
    messages.Agree("agree #0", 3, [0, 1, 2]),
]
_FROM_STORE: list[Any] = [
    messages.Welcome(
        b"key", [0, 0, 2], [messages.Whereabouts("host", 1, 2, "boot"), None, messages.Whereabouts("host", 0, 3, "")]
    ),
    messages.Cards("split #1", [b"a", b"b"], 3),
    messages.Disbanded(1),
    messages.Question(1, 0, 3),
    messages.Verdict("lost", "rank 1 was lost", 1),
    messages.Shrunk([0, 2], "host", 1234),
    messages.Agreement("agree #0", 3, messages.Verdict("lost", "rank 1 was lost", 1)),
]
_SENT = tuple(messages.encode(each) for each in _FROM_RANK[:3])
_SIGNATURE = wire.CallSignature("all_reduce", 11, (4,), "sum", 1, count=4)

READERS: Final[dict[str, Reader]] = {
    "from_rank": Reader([messages.encode(each) for each in _FROM_RANK], _from_rank),
    "join": Reader([messages.encode(_JOIN), messages.encode(_JOIN_AGAIN)], _join),
    "from_store": Reader([messages.encode(each) for each in _FROM_STORE], _from_store),
    "frames": Reader([_sealed(_SENT), _sealed([bytes(2000)])], _frames),
    "card": Reader([write_card([[1, "a"]]), write_card({"a": b"b"}), write_card([None, 3])], _card),
    "object": Reader(
        [
            bytes(pack({"a": [1, 2.0, "x", b"y", None]}, "send_object")),
            bytes(pack([np.arange(3.0)], "send_object")),
            bytes(pack(np.zeros(2, [("x", "f4"), ("y", "i8", (2,))]), "send_object")),
        ],
        _object,
    ),
    "header": Reader([wire.pack_header(_SIGNATURE, 1, 0, 7, 16, 0)], _header),
    "opening": Reader(
        [
            wire.pack_description(np.dtype("f8"), (2, 3)),
            wire.pack_description(np.dtype([("x", "f4"), ("y", "i8", (2,))]), (1,)),
        ],
        _opening,
    ),
    "handshake": Reader(
        [ClientHandshake(b"other", b"hello").answer(ServerHandshake(b"other").greeting), b"ACCORD\x00\x02"], _handshake
    ),
    "record": Reader([_dump(), _dump(reason="closed", verdict=None), _dump(raised="a.py:2", calls=[])], _record),
    "error_file": Reader([json.dumps(_RECORD).encode()], _error_file),
    "toml": Reader(
        [b'backend = "tcp"\n[backends.tcp]\nhost = "a"\n', b'[[rule]]\ncollective = "all_reduce"\nalgorithm = "ring"\n'], _toml
    ),
    "network": Reader(
        [b"[links]\nlatency_us = 2.0\nbandwidth_GBps = 10.0\n", b'summary = "x"\n[[kill]]\nrank = 1\nat_us = 3.0\n'], _network
    ),
    "checkpoint": Reader([(_SAVED / storage.METADATA).read_bytes()], _checkpoint),
    "metadata": Reader(
        [json.dumps(forged_checkpoints.body_of(_SAVED)).encode()], lambda data: _checkpoint(forged_checkpoints.sealed(data[1:]))
    ),
    "safetensors": Reader(
        [b'{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(88) + bytes(8)], _safetensors
    ),
    "rpc": Reader(
        [bytes(packing.pack({"a": [1, np.arange(3.0)]}, "it").data), bytes(packing.pack([1, "x", b"y"], "it").data)], _rpc
    ),
    "address": Reader([b"node1:29500", b"[::1]:29500", b"[fe80::1%eth0]:1"], _address),
    "hosts": Reader([b"node[1-3,07],gpu[01-02]-ib", b"2(x3),1", b"host1 4 host2 2"], _hosts),
    "variables": Reader(
        [
            b"RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=a\nMASTER_PORT=1",
            b"SLURM_PROCID=1\nSLURM_NTASKS=2\nSLURM_JOB_NODELIST=n[1-2]\nTIMEOUT_S=3",
        ],
        _variables,
    ),
    "size": Reader([b"64KiB", b"1.5 MB", b"7"], _size),
}


def damaged(valid: Sequence[bytes]) -> Any:
    """Return a strategy: bytes of any kind, or valid ones of which some were changed, lost, doubled or added."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(list(valid)) | st.binary(max_size=100)))
        for _ in range(draw(st.integers(0, 5))):
            at = draw(st.integers(0, len(data)))
            until = at + draw(st.integers(0, 8))
            new = draw(
                st.binary(max_size=4) | st.sampled_from([b"null", b"-1", b"1e999", b"[", b"{", b'"', b"\xff\xff\xff\xff"])
            )
            data[at:until] = new * draw(st.integers(1, 3))
        return bytes(data)

    return build()


def _changed(data: bytes, size: int, seed: int) -> bytes:
    """Change what a message or a JSON text means, and leave it one: libFuzzer knows of neither, and mostly makes what is none."""
    import atheris

    chance = random.Random(seed)
    for codec in (msgspec.json, msgspec.msgpack) if chance.random() < 0.7 else ():
        with suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
            changed = codec.encode(_other(codec.decode(data), chance))
            if len(changed) <= size:
                return changed
    return bytes(atheris.Mutate(data, min(size, len(data) + 20)))


def _other(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        how = chance.random()
        rest = {name: each for name, each in value.items() if name != key}
        return rest if how < 0.05 else value | {key: _other(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at, how = chance.randrange(len(value)), chance.random()
        return (
            value[:at] + ([] if how < 0.05 else [value[at]] * 2 if how < 0.1 else [_other(value[at], chance)]) + value[at + 1 :]
        )
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.6:
        return value + chance.choice([-1, 1, chance.randint(-10, 10)])
    if isinstance(value, str) and chance.random() < 0.5:
        at = chance.randint(0, len(value))
        return value[:at] + chance.choice(["", "a", "\0", "#0", "/", "9" * 30, "\u2028"]) + value[at + chance.randint(0, 2) :]
    return chance.choice(
        [
            None,
            True,
            0,
            -1,
            1,
            1 << 31,
            (1 << 63) - 1,
            -(1 << 63),
            (1 << 64) - 1,
            1.5,
            -0.0,
            1e300,
            "",
            "x",
            b"",
            b"\xff" * 8,
            [],
            [0],
            {},
            {"a": 1},
        ]
    )


def _by_hypothesis(name: str, runs: int, seconds: float) -> int:
    """Try a reader; return how often."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    reader, until, count = READERS[name], time.monotonic() + seconds, 0

    @settings(
        max_examples=_BATCH, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(damaged(reader.valid))
    def attempt(data: bytes) -> None:
        nonlocal count
        count += 1
        _try(name, data)

    while count < runs and time.monotonic() < until:
        seed(count)(attempt)()
    return count


def _try(name: str, data: bytes) -> None:
    try:
        READERS[name].read(data)
    except BaseException:
        path = (
            Path(os.environ.get("FUZZ_FAILED", tempfile.gettempdir())) / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        )
        path.write_bytes(data)
        print(f"FAILED {name}: make test-fuzz FUZZ_ARGS='--readers {name} --input {path}'", flush=True)
        raise


def _by_atheris(name: str, runs: int, seconds: float) -> None:
    """Try a reader with libFuzzer, which ends the process."""
    import atheris

    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        for number, data in enumerate(READERS[name].valid):
            (Path(folder) / str(number)).write_bytes(data)
        for module in [module for key, module in sys.modules.items() if key.startswith("oneaccord") and module is not None]:
            for value in vars(module).values():
                if callable(value) and getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
                    atheris.instrument_func(value)
        words = [
            sys.argv[0],
            f"-runs={runs}",
            f"-max_total_time={max(1, int(seconds))}",
            "-max_len=2000",
            "-verbosity=0",
            f"-artifact_prefix={folder}/",
            "-print_final_stats=1",
        ]
        atheris.Setup([*words, folder], lambda data: _try(name, data), custom_mutator=_changed)
        atheris.Fuzz()


def _has_atheris() -> bool:
    return subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True, check=False).returncode == 0


def _in_process(name: str, engine: str, runs: int, seconds: float) -> tuple[int, str]:
    """Run one reader in a process of its own; return how often it was tried, and what went wrong."""
    words = ["--one", engine, "--readers", name, "--runs", str(runs), "--seconds", str(seconds)]
    # In memory, where there is such a place: most of the time would go to the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": folder,
            "FUZZ_FAILED": tempfile.gettempdir(),
        }
        done = subprocess.run(
            [sys.executable, __file__, *words],
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=seconds + 300,
            check=False,
        )
    said = done.stdout + done.stderr
    found = re.search(r"(?:number_of_executed_units:|tried) +(\d+)", said)
    return int(found[1]) if found else 0, "" if done.returncode == 0 else said[-3000:]


def main() -> int:
    """Run the campaign; return its exit code: 0 where all readers hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--readers", default=",".join(READERS))
    parser.add_argument("--engines", default="hypothesis,atheris" if _has_atheris() else "hypothesis")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--input", type=Path, help="try this file once, and no more")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    words = parser.parse_args()
    readers = words.readers.split(",")
    if words.input is not None:
        READERS[readers[0]].read(words.input.read_bytes())
        return 0
    if words.one == "atheris":
        _by_atheris(readers[0], words.runs, words.seconds)
    elif words.one:
        print("tried", _by_hypothesis(readers[0], words.runs, words.seconds))
        return 0
    engines = words.engines.split(",")
    seconds = 60 * words.minutes / (len(readers) * len(engines))
    failed = []
    for engine in engines:
        for name in readers:
            count, problem = _in_process(name, engine, words.runs, seconds)
            print(f"{engine:10} {name:10} {count:>10,} runs{'  FAILED' if problem else ''}", flush=True)
            if problem:
                failed.append(name)
                print(problem)
    print(f"{len(readers)} readers, {len(engines)} engines, {len(failed)} failed{f': {failed}' if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
