"""What a call costs in Python: how many functions it goes through when it was made before, and how many modules the first time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import preloaded

from oneaccord.common.native import native, why_not_native

compiled_alone = pytest.mark.skipif(native() is None, reason=why_not_native() or "it is there")

PROGRAM = """
import json, sys, time
import numpy as np
import oneaccord as oa

BESIDE = {"open_transport", "open_barrier", "connect", "mailboxes", "_links_of", "wait", "finish", "checked_transfer"}  # dialling and polling
trace, beside = [], 0

def profile(frame, event, _):
    global beside
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if event == "call":
        if beside or name in BESIDE or module.startswith(("oneaccord_tcp", "oneaccord_shm")):
            beside += 1
        if module.startswith("oneaccord"):
            trace.append((module, bool(beside)))
    elif event == "return" and beside:
        beside -= 1

def traced(call):
    global beside
    trace.clear()
    beside = 0
    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return list(trace)

most, limit = json.loads(sys.argv[1]), time.monotonic() + 30
with oa.init() as group:
    x, out, other = np.zeros(1), np.zeros(1), 1 - group.rank
    modules = [module for module, is_beside in traced(lambda: group.all_reduce(x)) if not is_beside]
    found = {"modules": len(set(modules)), "changes": sum(a != b for a, b in zip(modules, modules[1:]))}
    calls = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce out": lambda: group.all_reduce(x, out=out),
        "all_reduce timeout_s": lambda: group.all_reduce(x, timeout_s=5.0),
        "scatter": lambda: group.scatter(np.zeros(2) if group.rank == 0 else None),
        "send": lambda: group.send(x, other) if group.rank == 0 else group.recv(other),
        "recv": lambda: group.recv(other) if group.rank == 0 else group.send(x, other),
        "sendrecv": lambda: group.sendrecv(x, other, other),
        "all_reduce_async": lambda: group.all_reduce_async(x).wait(),
        "send_async": lambda: (group.send_async(x, other) if group.rank == 0 else group.recv_async(other)).wait(),
        "recv_async": lambda: (group.recv_async(other) if group.rank == 0 else group.send_async(x, other)).wait(),
        "tagged send": lambda: group.send(x, other, tag=1) if group.rank == 0 else group.recv(other, tag=1),
        "tagged recv": lambda: group.recv(other, tag=1) if group.rank == 0 else group.send(x, other, tag=1),
        "tagged recv any": lambda: group.recv(tag=oa.ANY_TAG, out=out) if group.rank == 0 else group.send(x, other, tag=1),
        "tagged send_object": lambda: group.send_object(1, other, tag=1) if group.rank == 0 else group.recv_object(other, tag=1),
        "tagged recv_object": lambda: group.recv_object(other, tag=1) if group.rank == 0 else group.send_object(1, other, tag=1),
        "tagged send_async": lambda: group.send_async(x, other, tag=1).wait() if group.rank == 0 else group.recv(other, tag=1),
        "tagged recv_async": lambda: group.recv_async(other, tag=1).wait() if group.rank == 0 else group.send(x, other, tag=1),
        "iprobe": group.iprobe,
    }
    for name, call in calls.items():
        for _ in range(5):
            call()
        found[name] = 1000
        # Where much is at work, most calls wait for the peer, which costs more: as many as it takes until one does not.
        while group.broadcast(found[name] > most[name] and time.monotonic() < limit):
            for _ in range(20):
                group.barrier()
                found[name] = min(found[name], len(traced(call)))
    if group.rank == 0:
        print(json.dumps(found))
"""

MOST = {
    "all_reduce": 16,
    "all_reduce out": 16,
    "all_reduce timeout_s": 16,
    "scatter": 42,
    "send": 17,
    "recv": 18,
    "sendrecv": 31,
    "all_reduce_async": 22,
    "send_async": 21,
    "recv_async": 21,
    "tagged send": 36,
    "tagged recv": 56,
    "tagged recv any": 98,
    "tagged send_object": 33,
    "tagged recv_object": 65,
    "tagged send_async": 62,
    "tagged recv_async": 108,
    "iprobe": 42,
    "modules": 16,
    "changes": 27,
}
"""The most Python functions of oneaccord that a call made before goes through in the caller's thread; of the first call, modules and changes of module."""
COMPILED = {name: 1 for name, most in MOST.items() if most < 20 or name == "sendrecv"} | {
    "scatter": 8,
    "all_reduce_async": 20,
    "send_async": 20,
    "recv_async": 20,
    "tagged send": 1,
    "tagged recv": 1,
    "tagged recv any": 1,
    "tagged send_object": 11,
    "tagged recv_object": 4,
    "tagged send_async": 3,
    "tagged recv_async": 46,
    "iprobe": 1,
    "modules": 15,
    "changes": 26,
}
"""The same of the compiled form: the group's method, and then C."""


@pytest.mark.parametrize("is_compiled", [pytest.param(True, marks=compiled_alone), False], ids=["compiled", "python"])
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_what_a_call_costs_in_python(tmp_path: Path, backend: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEACCORD_NATIVE", str(is_compiled))
    (tmp_path / "program.py").write_text(PROGRAM)
    most = COMPILED if is_compiled else MOST
    if backend == "shm" and not is_compiled:  # one that waits a moment for the peer's slot
        most = most | {name: count + 1 for name, count in most.items()}
    run = ["-m", "oneaccord", "run", "-n", "2", "--no-prefix", "--backend", backend, "program.py", json.dumps(most)]
    done = preloaded.run(run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {name: count for name, count in found.items() if count > most[name]} == {}
