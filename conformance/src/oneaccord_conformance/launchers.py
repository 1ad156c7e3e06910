"""The checks of launchers: what core relies on, tried on the launcher itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oneaccord
from oneaccord.api import Ask, Deadline, Host, HostLauncher, describe_launcher, make_host_launcher

__all__ = ["CHECKS", "Finding", "check_launcher"]

_ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write(repr(sys.argv[1:]))"
_WAITS = "import os, sys; print('pid', os.getpid(), flush=True); sys.stdin.buffer.read()"
_IS_THERE = """
import os, sys
try:
    os.kill(int(sys.argv[1]), 0)
    stat = open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[0]
    print("ended" if stat in "ZX" else "runs")
except ProcessLookupError:
    print("ended")
except OSError:
    print("runs")
"""
_STRANGE = ("a b", "it's", '"$HOME"', "a\\b", "*", "", "x;y", "ä")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Attributes
    ----------
    name, promise
        The check.
    fault
        What is wrong, in words; empty if nothing is.
    """

    name: str
    promise: str
    fault: str


class _Case:
    """What the checks of a launcher share."""

    def __init__(self, name: str, options: Mapping[str, Any], ranks: int, timeout_s: float) -> None:
        self.name, self.options, self.ranks, self.timeout_s = name, options, ranks, timeout_s
        self.launcher: HostLauncher | None = None
        self.hosts: Sequence[Host] = ()

    def make(self) -> HostLauncher:
        if self.launcher is None:
            self.launcher = make_host_launcher(self.name, self.options)
            self.hosts = self.launcher.allocate(Ask(self.ranks), Deadline(self.timeout_s))
        return self.launcher

    def run(self, host: Host, argv: Sequence[str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = self.make().command(host, [host.python, *argv])
        return subprocess.run(command, input=given, capture_output=True, timeout=self.timeout_s, check=False)


def _describes(case: _Case) -> str:
    spec = describe_launcher(case.name)
    if spec.kind not in ("hosts", "workers", "jobs"):
        return f"its kind is {spec.kind!r}"
    return "" if spec.summary and spec.install else "its summary or its install is empty"


def _is_usable(case: _Case) -> str:
    reason = describe_launcher(case.name).probe()
    return "" if reason is None else f"its probe says that it cannot be used here: {reason}"


def _allocates(case: _Case) -> str:
    case.make()
    names = [host.name for host in case.hosts]
    if len(set(names)) != len(names):
        return f"two hosts have one name: {names}"
    if any(host.slots < 1 for host in case.hosts):
        return f"a host takes no rank: {list(case.hosts)}"
    room = sum(host.slots for host in case.hosts)
    return "" if room >= case.ranks else f"the hosts take {room} ranks, and {case.ranks} were asked for"


def _passes_bytes(case: _Case) -> str:
    case.make()
    given = bytes(range(256)) * 1024
    for host in case.hosts:
        done = case.run(host, ["-c", _ECHO, *_STRANGE], given)
        if done.returncode:
            return f"{host.name}: exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()}"
        if given not in done.stdout:
            return f"{host.name}: {len(given)} bytes of standard input came back as {len(done.stdout)} other ones"
        if repr(list(_STRANGE)) not in done.stderr.decode(errors="replace"):
            return f"{host.name}: the words {list(_STRANGE)} became {done.stderr.decode(errors='replace').strip()}"
    return ""


def _passes_at_once(case: _Case) -> str:
    command = case.make().command(case.hosts[0], [case.hosts[0].python, "-c", _WAITS])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        found = any(line.startswith(b"pid ") for line in process.stdout)  # a deadline of its own would be no proof
        process.communicate(timeout=case.timeout_s)
    return "" if found else "the process ended without a line of its program"


def _ends_with_its_command(case: _Case) -> str:
    case.make()
    for host in case.hosts:
        command = case.make().command(host, [host.python, "-c", _WAITS])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(b"pid ")), b"")
            process.kill()
        if not line:
            return f"{host.name}: the program wrote nothing"
        until = Deadline(case.timeout_s)
        while b"ended" not in case.run(host, ["-c", _IS_THERE, line.split()[1].decode()]).stdout:
            if until.passed():
                return f"{host.name}: when its command was killed, the program there had not seen the end of its standard input"
            time.sleep(0.1)
    return ""


def _releases(case: _Case) -> str:
    launcher = case.make()
    launcher.release()
    launcher.release()
    case.launcher = None
    return ""


def _runs_functions(case: _Case) -> str:
    found = oneaccord.launch(
        oneaccord.Group.all_gather_object, case.ranks, on=case.name, args=("x",), timeout_s=case.timeout_s, options=case.options
    )
    return "" if found == [["x"] * case.ranks] * case.ranks else f"a function on all ranks returned {found}"


CHECKS: dict[str, tuple[str, bool, Callable[[_Case], str]]] = {
    "description": ("its description is complete", False, _describes),
    "probe": ("it can be used here", False, _is_usable),
    "allocate": ("its hosts have names of their own, and room for the ranks", True, _allocates),
    "bytes": ("a host passes words, standard input, output and error through as they are", True, _passes_bytes),
    "delay": ("output comes while the program runs", True, _passes_at_once),
    "end": ("if its command is killed, the program sees the end of its standard input", True, _ends_with_its_command),
    "release": ("hosts can be given back twice", True, _releases),
    "launch": ("a function runs on all ranks", False, _runs_functions),
}
"""For each check its promise, whether it is for launchers of hosts alone, and the function that returns a fault."""


def check_launcher(
    name: str, options: Mapping[str, Any], ranks: int, timeout_s: float, told: Callable[[Finding], None]
) -> list[Finding]:
    """Return what the checks of a launcher find; after a fault of the first two, the others are left out.

    Parameters
    ----------
    name, options
        The launcher.
    ranks
        How many ranks it is asked for.
    timeout_s
        The most seconds of each step.
    told
        Called with each finding.
    """
    case, findings = _Case(name, options, ranks, timeout_s), list[Finding]()
    kind = describe_launcher(name).kind
    try:
        for check, (promise, of_hosts, look) in CHECKS.items():
            if (of_hosts and kind != "hosts") or (check == "launch" and kind == "jobs"):  # it runs no functions
                continue
            try:
                fault = look(case)
            except Exception as error:  # noqa: BLE001 - of the launcher, of any kind
                fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
            findings.append(Finding(check, promise, fault))
            told(findings[-1])
            if fault and check in ("description", "probe"):
                break
    finally:
        if case.launcher is not None:
            case.launcher.release()
        sys.stdout.flush()
    return findings
