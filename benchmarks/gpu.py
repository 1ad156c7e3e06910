"""What a call on a GPU costs: time on the host until it returns, and time on the device, next to NCCL's raw binding and to other libraries.

All contenders live in the same processes and use the same arrays and the same stream; each has a communicator of its own with the same options.
They take turns, in an order that rotates and turns round. A turn is a handful of calls behind work that keeps the device busy until they are
all enqueued, so that the device's time is its own: the events around them tell how long it took, and the host's clock how long the calls
took to return. Medians are of all turns of all ranks. Sums are of zeros, so that they may be repeated; before that, each contender must give
the right sum.

- in place: ``all_reduce(x, out=x)``, which all of them have
- out: ``all_reduce(x, out=y)``
- 8 as one: eight arrays by one group of NCCL's
- beside: in the background, and the stream waits for it

Usage: python benchmarks/gpu.py [-h] [--ranks N ...] [--sizes BYTES ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import oneaccord as oa

SIZES = ["8", "1KiB", "32KiB", "1MiB", "16MiB", "128MiB", "1GiB"]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
OURS, RAW, TORCH = "oneaccord", "raw", "torch"
TOGETHER = 8
PATIENCE_S = 60.0
LIMIT_S = 900.0
FLOAT32, SUM = 7, 0  # NCCL's numbers
# Several ranks on one GPU: their kernels must fit on it at once.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
SHARED_MAX_CTAS = 4
TARGET = "targets, out and in place: host time within 3 us of the raw binding's, and at most half of torch's; device time equal to the raw binding's"

Call = Callable[[], object]
Cases = dict[str, Call]
Row = dict[str, Any]


class Place:
    """A folder where ranks leave words for each other.

    Parameters
    ----------
    folder
        Where; all ranks have the same.
    rank, world_size
        Whose words are written, and how many ranks there are.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder = folder
        self.rank = rank
        self.world_size = world_size

    def put(self, name: str, content: bytes) -> None:
        """Leave a word."""
        unfinished = self.folder / f"{name}.{self.rank}.part"
        unfinished.write_bytes(content)
        unfinished.rename(self.folder / f"{name}.{self.rank}")

    def get(self, name: str, rank: int) -> bytes:
        """Return a rank's word, once it is there."""
        file, limit = self.folder / f"{name}.{rank}", time.monotonic() + PATIENCE_S
        while not file.exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"rank {rank} left no {name}")
            time.sleep(0.001)
        return file.read_bytes()

    def agree(self, name: str, problem: str) -> str:
        """Return the first problem that a rank has; empty where none has any."""
        self.put(name, problem.encode())
        return next(filter(None, (self.get(name, rank).decode() for rank in range(self.world_size))), "")


# Who takes part. Each makes its calls for given arrays, on the current stream.


class Oneaccord:
    """Groups of oneaccord over the backend nccl."""

    def __init__(self, group: oa.Group) -> None:
        self._group = group

    def cases(self, x: Any, y: Any, several: Sequence[Any]) -> Cases:
        """Return the calls."""
        group = self._group

        def together() -> None:
            with group.coalesce() as batch:
                for each in several:
                    batch.all_reduce(each, out=each)

        return {
            "in place": lambda: group.all_reduce(x, out=x),
            "out": lambda: group.all_reduce(x, out=y),
            f"{TOGETHER} as one": together,
            "beside": lambda: group.all_reduce_async(x, out=x).wait(),
        }


class Raw:
    """NCCL's functions as ``nccl.bindings.nccl`` has them, with a communicator that blocks, as those of oneaccord do, and nothing around them."""

    def __init__(self, place: Place, max_ctas: int | None, name: str) -> None:
        nccl = self._nccl = import_module("nccl.bindings.nccl")
        if place.rank == 0:
            place.put(f"{name} id", bytes(nccl.get_unique_id()))
        config = nccl.Config()
        config.blocking = 1
        if max_ctas is not None:
            config.max_ctas = max_ctas
        identity = nccl.UniqueId.from_buffer(bytearray(place.get(f"{name} id", 0)))
        self._comm = nccl.comm_init_rank_config(place.world_size, identity, place.rank, config.ptr)

    def cases(self, x: Any, y: Any, several: Sequence[Any]) -> Cases:
        """Return the calls."""
        call, start, end, comm = self._nccl.all_reduce, self._nccl.group_start, self._nccl.group_end, self._comm
        source, target, count = x.data.ptr, y.data.ptr, x.size
        stream = import_module("cupy").cuda.get_current_stream().ptr
        pointers = [(each.data.ptr, each.size) for each in several]

        def together() -> None:
            start()
            for pointer, size in pointers:
                call(pointer, pointer, size, FLOAT32, SUM, comm, stream)
            end()

        return {
            "in place": lambda: call(source, source, count, FLOAT32, SUM, comm, stream),
            "out": lambda: call(source, target, count, FLOAT32, SUM, comm, stream),
            f"{TOGETHER} as one": together,
        }

    def close(self) -> None:
        """Give the communicator back."""
        self._nccl.comm_finalize(self._comm)
        self._nccl.comm_destroy(self._comm)


class Cupyx:
    """``cupyx.distributed``."""

    def __init__(self, place: Place) -> None:
        distributed = import_module("cupyx.distributed")
        self._comm = distributed.init_process_group(place.world_size, place.rank, port=int(os.environ["CUPYX_PORT"]))

    def cases(self, x: Any, y: Any, several: Sequence[Any]) -> Cases:
        """Return the calls."""
        comm = self._comm
        return {"in place": lambda: comm.all_reduce(x, x), "out": lambda: comm.all_reduce(x, y)}

    def close(self) -> None:
        """End the process that rank 0 met the others by."""
        self._comm.stop()


class Torch:
    """``torch.distributed`` with its NCCL; its tensors are the same memory, and its current stream the same one."""

    def __init__(self, place: Place) -> None:
        self._torch = torch = import_module("torch")
        self._distributed = import_module("torch.distributed")
        device = import_module("cupy").cuda.runtime.getDevice()
        torch.cuda.set_device(device)
        self._distributed.init_process_group(
            "nccl", init_method=f"file://{place.folder}/torch", rank=place.rank, world_size=place.world_size
        )

    def cases(self, x: Any, y: Any, several: Sequence[Any]) -> Cases:
        """Return the calls."""
        torch, distributed = self._torch, self._distributed
        torch.cuda.set_stream(torch.cuda.ExternalStream(import_module("cupy").cuda.get_current_stream().ptr))
        tensor = torch.as_tensor(x, device="cuda")
        assert tensor.data_ptr() == x.data.ptr
        return {
            "in place": lambda: distributed.all_reduce(tensor),
            "beside": lambda: distributed.all_reduce(tensor, async_op=True).wait(),
        }

    def close(self) -> None:
        """Leave the process group."""
        self._distributed.destroy_process_group()


def contenders(group: oa.Group, place: Place, max_ctas: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return who takes part, and why others do not; alike on all ranks."""
    made: dict[str, Any] = {OURS: Oneaccord(group)}
    left_out: dict[str, str] = {}
    others: dict[str, Callable[[], Any]] = {
        RAW: lambda: Raw(place, max_ctas, RAW),
        "cupyx": lambda: Cupyx(place),
        TORCH: lambda: Torch(place),
    }
    for name, make in others.items():
        problem = ""
        try:
            found = make()
            _try(found)
        except Exception as error:  # noqa: BLE001 - libraries that are not here, or not made for several ranks on a GPU
            found, problem = None, f"{type(error).__name__}: {error}"
        reason = place.agree(f"has {name}", problem)
        if reason:
            left_out[name] = reason
        else:
            made[name] = found
    return made, left_out


def _try(party: Any) -> None:
    """Make each call of a contender once: some connect only then, and fail where ranks share a GPU."""
    cupy = import_module("cupy")
    x, y = cupy.zeros(2, np.float32), cupy.zeros(2, np.float32)  # kept until all is done: the raw binding keeps nothing
    for call in party.cases(x, y, []).values():
        call()
    cupy.cuda.get_current_stream().synchronize()


# How they are measured.


def measure(group: oa.Group, folder: Path, sizes: Sequence[int], rounds: int, max_ctas: int | None) -> dict[str, Any]:
    """Measure on one rank; return its samples, and why contenders are left out."""
    cupy = import_module("cupy")
    place = Place(folder, group.rank, group.world_size)
    # oneaccord makes its communicator ready here, with the others still to come.
    group.all_reduce(cupy.zeros(1, np.float32))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        parties, left_out = contenders(group, place, max_ctas)
        ballast = cupy.zeros(min(64 << 20, 64 * max(sizes)), np.float32)
        samples: list[Row] = []
        for nbytes in sizes:
            samples += list(_measure_size(group, cupy, stream, parties, ballast, nbytes, rounds))
        group.synchronize()
        stream.synchronize()
        for party in parties.values():
            if hasattr(party, "close"):
                party.close()
    return {"samples": samples, "left_out": left_out}


def _measure_size(
    group: oa.Group, cupy: Any, stream: Any, parties: dict[str, Any], ballast: Any, nbytes: int, rounds: int
) -> Iterator[Row]:
    count = max(nbytes // 4, 1)
    x, y = cupy.full(count, group.rank + 1, np.float32), cupy.zeros(count, np.float32)
    # More would not fit, and says no more.
    several = [cupy.zeros(count, np.float32) for _ in range(TOGETHER if nbytes <= 16 << 20 else 0)]
    runs: dict[str, list[tuple[str, Call]]] = {}
    for name, party in parties.items():
        for case, call in party.cases(x, y, several).items():
            if several or "as one" not in case:
                runs.setdefault(case, []).append((name, call))
    total = group.world_size * (group.world_size + 1) // 2
    for name, call in runs["in place"]:
        x.fill(group.rank + 1)
        call()
        assert set(x.get()[[0, -1]].tolist()) == {total}, f"{name} gives a wrong sum"
    x.fill(0)
    calls = 50 if nbytes <= 1 << 20 else 10 if nbytes <= 16 << 20 else 3
    for case, entries in runs.items():
        for _, call in entries:  # what is made in the first calls is not timed
            for _ in range(3):
                call()
        group.synchronize()
        stream.synchronize()
        for number in range(rounds):
            shift = number % len(entries)
            turns = entries[shift:] + entries[:shift]
            for name, call in turns if number // len(entries) % 2 == 0 else turns[::-1]:
                host_us, device_us = _turn(cupy, stream, ballast, call, calls)
                yield {"nbytes": nbytes, "case": case, "name": name, "host_us": host_us, "device_us": device_us}


def _turn(cupy: Any, stream: Any, ballast: Any, call: Call, calls: int) -> tuple[float, float]:
    """Make some calls; return the microseconds of each, until it returned and on the device."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(24):  # some 2 ms on the fastest of GPUs
        ballast.fill(0)
    start.record(stream)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    returned = time.perf_counter()
    end.record(stream)
    end.synchronize()
    return (returned - started) / calls * 1e6, cupy.cuda.get_elapsed_time(start, end) / calls * 1e3


# What is made of it.


def table(samples: Sequence[Row]) -> list[Row]:
    """Return a row for each size and case: the medians of all contenders, and how oneaccord compares."""
    groups: dict[tuple[int, str], dict[str, list[Row]]] = {}
    for sample in samples:
        groups.setdefault((sample["nbytes"], sample["case"]), {}).setdefault(sample["name"], []).append(sample)
    rows = []
    for (nbytes, case), by_name in groups.items():
        host = {name: statistics.median(each["host_us"] for each in found) for name, found in by_name.items()}
        device = {name: statistics.median(each["device_us"] for each in found) for name, found in by_name.items()}
        row: Row = {"nbytes": nbytes, "case": case, "host_us": host, "device_us": device}
        if RAW in host:
            row["over_raw_us"] = host[OURS] - host[RAW]
            row["device_ratio_to_raw"] = device[OURS] / device[RAW] if device[RAW] else 1.0
        if TORCH in host:
            row["host_ratio_to_torch"] = host[OURS] / host[TORCH]
        rows.append(row)
    return rows


def describe(rows: Sequence[Row], world_size: int, left_out: dict[str, str]) -> Iterator[str]:
    """Return the lines of the table that people read."""
    names = list(dict.fromkeys(name for row in rows for name in row["host_us"]))
    yield f"all_reduce, float32 sum, {world_size} rank{'s' * (world_size > 1)}, medians in microseconds"
    yield from (f"left out: {name}: {reason}" for name, reason in left_out.items())
    columns = [*(f"host {name}" for name in names), "over raw", ": torch", *(f"device {name}" for name in names), ": raw"]
    yield "  ".join([f"{'size':>8}", f"{'case':<9}", *(f"{column:>16}" for column in columns)])
    for row in rows:
        cells = [_cell(row["host_us"].get(name)) for name in names]
        cells += [_cell(row.get("over_raw_us")), _cell(row.get("host_ratio_to_torch"))]
        cells += [_cell(row["device_us"].get(name)) for name in names] + [_cell(row.get("device_ratio_to_raw"))]
        yield "  ".join([f"{spelled(row['nbytes']):>8}", f"{row['case']:<9}", *(f"{cell:>16}" for cell in cells)])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def spelled(nbytes: int) -> str:
    """Return a number of bytes as people write it."""
    unit = next((name for name, size in reversed(UNITS.items()) if nbytes >= size), None)
    return f"{nbytes}B" if unit is None else f"{nbytes // UNITS[unit]}{unit}"


def parsed(text: str) -> int:
    """Return the bytes of ``"32KiB"``."""
    unit = next((name for name in UNITS if text.endswith(name)), None)
    return int(text) if unit is None else int(text.removesuffix(unit)) * UNITS[unit]


def circumstances() -> dict[str, str]:
    """Return when and on what this is measured."""
    cupy, nccl = import_module("cupy"), import_module("nccl.bindings.nccl")
    runtime = cupy.cuda.runtime
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "gpus": str(runtime.getDeviceCount()),
        "driver": _driver(),
        "cuda": f"runtime {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}",
        "nccl": str(nccl.get_version()),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "oneaccord": oa.__version__,
    }
    for package in ("nccl4py", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return "unknown"


# How ranks are started.

Start = Callable[[int, list[int], int], list[dict[str, Any]]]
"""``start(world_size, sizes, rounds)``: measures on so many ranks, and returns what `measure` returned on each."""


def on_processes(world_size: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Start each rank as a process; where there are more than GPUs, they share them."""
    is_shared = world_size > import_module("cupy").cuda.runtime.getDeviceCount()
    with tempfile.TemporaryDirectory() as name:
        port = _free_port()
        environ = {
            **os.environ,
            **({key: os.environ.get(key, value) for key, value in SHARING.items()} if is_shared else {}),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUPYX_PORT": str(_free_port()),
        }
        request = json.dumps({"folder": name, "sizes": sizes, "rounds": rounds, "is_shared": is_shared})
        command = [sys.executable, __file__, "--as-rank", request]
        ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(world_size)]
        limit = time.monotonic() + LIMIT_S
        try:
            # Once one has failed, the others may wait for it for ever.
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > limit:
                    raise RuntimeError(f"the {world_size} ranks were not done within {LIMIT_S:g} s")
                time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        if any(codes):
            raise RuntimeError(f"the {world_size} ranks ended with {codes}")
        return [json.loads(Path(name, f"measured.{rank}").read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_rank(request: dict[str, Any]) -> None:
    max_ctas = SHARED_MAX_CTAS if request["is_shared"] else None
    config = {"backend": "nccl", "plugins": _uninstalled()}
    with oa.init(config=config, timeout_s=PATIENCE_S) as group:
        import_module("cupy").cuda.Device(group.backend().device).use()  # type: ignore[union-attr]
        measured = measure(group, Path(request["folder"]), request["sizes"], request["rounds"], max_ctas)
    Path(request["folder"], f"measured.{group.rank}").write_text(json.dumps(measured))


def _uninstalled() -> list[str]:
    """Return the plugin's module where it is on the path and not installed."""
    from importlib.metadata import entry_points

    return [] if any(entry.name == "nccl" for entry in entry_points(group="oneaccord")) else ["oneaccord_nccl.plugin"]


def main(words: Sequence[str] | None = None, start: Start = on_processes) -> None:
    """Measure, print a table for each number of ranks, and write all of it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, one table for each")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes of an array, such as 8 or 32KiB")
    parser.add_argument("--rounds", type=int, default=30, help="how many turns each contender has")
    parser.add_argument("--json", type=Path, help="the file that all samples' medians are written to")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.as_rank:
        _as_rank(json.loads(options.as_rank))
        return
    try:
        found = circumstances()
    except Exception as error:  # noqa: BLE001 - CuPy or NCCL is missing, or finds no driver
        sys.exit(f"there is no GPU that CuPy and NCCL can use: {error}")
    report: dict[str, Any] = {"circumstances": found, "target": TARGET, "worlds": []}
    print(", ".join(f"{name} {value}" for name, value in report["circumstances"].items()))
    for world_size in options.ranks:
        try:
            measured = start(world_size, [parsed(size) for size in options.sizes], options.rounds)
        except RuntimeError as error:
            print(f"\n{world_size} ranks could not be measured: {error}")
            report["worlds"].append({"ranks": world_size, "problem": str(error)})
            continue
        rows = table([sample for rank in measured for sample in rank["samples"]])
        print("", *describe(rows, world_size, measured[0]["left_out"]), sep="\n")
        report["worlds"].append({"ranks": world_size, "left_out": measured[0]["left_out"], "rows": rows})
    print(f"\n{TARGET}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
