"""Ranks with GPUs that are processes of their own, each made from nothing, since CUDA does not survive a fork.

Run as a script, this file is such a process: it makes the group, runs a program in it, and leaves word of what came of it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from support.worlds import free_port

__all__ = ["FOLDER", "Outcome", "environment", "run_ranks"]

_HERE = Path(__file__).resolve().parents[1]
FOLDER = "GPU_TEST_FOLDER"
"""The variable that names the folder where ranks leave word for the test."""
_MODULES = ("oneaccord_nccl.plugin", "oneaccord_hybrid.plugin", "oneaccord_tcp.plugin")


@dataclass(frozen=True)
class Outcome:
    """What came of one rank.

    Attributes
    ----------
    code
        Its exit code, negative for a signal.
    output
        What it wrote.
    result
        What its program returned.
    error, text, peer
        The type and the words of what was raised instead, and the rank that it blames.
    ended
        When the program was over, by the clock of `time.monotonic`, which all processes of a host share.
    """

    code: int | None = None
    output: str = ""
    result: Any = None
    error: str | None = None
    text: str = ""
    peer: int | None = None
    ended: float = 0.0


def environment() -> dict[str, str]:
    """Return the variables of a rank: this process's path, and the plugins by their modules where they are not installed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ONEACCORD_", "SLURM_", "PMI", "OMPI_"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(_HERE), *(str(Path(path).absolute()) for path in sys.path if path)])
    installed = {entry.name for entry in entry_points(group="oneaccord")}
    if not {"nccl", "hybrid", "tcp"} <= installed:
        clean["ONEACCORD_PLUGINS"] = ",".join(_MODULES)
    return clean


def run_ranks(
    program: str,
    world_size: int,
    folder: Path,
    *,
    config: Mapping[str, Any],
    module: str = "support.gpu_programs",
    words: Sequence[str] = (),
    arrays: str = "cupy",
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 20.0,
    patience_s: float = 100.0,
) -> list[Outcome]:
    """Run ``program``, the name of a function of `gpu_programs`, on ranks that are processes; return what came of each.

    Parameters
    ----------
    program
        Its name.
    world_size
        How many ranks there are.
    folder
        An empty folder for what they write.
    config
        The config of each.
    module
        Where it is.
    words
        What it is given beside the group and the module of the arrays.
    arrays
        The name of that module.
    variables
        Further variables of each.
    timeout_s
        The timeout of their group.
    patience_s
        When all processes are killed; the test fails by that.
    """
    environ = environment() | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ONEACCORD_SECRET": "the secret of the tests",
        FOLDER: str(folder),
        **(variables or {}),
    }
    request = json.dumps(
        {
            "program": program,
            "module": module,
            "words": list(words),
            "arrays": arrays,
            "config": config,
            "timeout_s": timeout_s,
            "patience_s": patience_s,
        }
    )
    processes: list[subprocess.Popen[bytes]] = []
    limit = time.monotonic() + patience_s
    try:
        for rank in range(world_size):
            with (folder / f"output{rank}").open("wb") as output:
                command = [sys.executable, __file__, request]
                each = {**environ, "RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=each, cwd=folder, stdout=output, stderr=output))
        for process in processes:
            process.wait(max(limit - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        written = "\n".join((folder / f"output{rank}").read_text(errors="replace") for rank in range(len(processes)))
        raise AssertionError(f"{program} on {world_size} ranks was not over within {patience_s:g} s:\n{written}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_outcome(folder, rank, process.returncode) for rank, process in enumerate(processes)]


def _outcome(folder: Path, rank: int, code: int) -> Outcome:
    file, output = folder / f"outcome{rank}", (folder / f"output{rank}").read_text(errors="replace")
    told = json.loads(file.read_text()) if file.exists() else {}
    return Outcome(**{**told, "code": code, "output": output})


def _run(request: dict[str, Any]) -> Outcome:
    import oneaccord as oa

    arrays = importlib.import_module(request["arrays"])
    program = getattr(importlib.import_module(request["module"]), request["program"])

    def begin() -> oa.Group:
        group = oa.init(config=request["config"], timeout_s=request["timeout_s"])
        nccl = group.backend("nccl")
        if nccl is not None and request["arrays"] == "torch":
            arrays.cuda.set_device(nccl.device)
        elif nccl is not None:
            arrays.cuda.Device(nccl.device).use()
        return group

    try:
        if getattr(program, "begins_itself", False):
            result = program(begin, arrays, *request["words"])
        else:
            with begin() as group:
                result = program(group, arrays, *request["words"])
    except Exception as error:
        traceback.print_exc()
        peer = getattr(error, "peer", None)
        return Outcome(error=type(error).__name__, text=str(error), peer=peer, ended=time.monotonic())
    return Outcome(result=result, ended=time.monotonic())


def _main() -> None:
    request = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(request["patience_s"] - 5, exit=True)
    outcome = _run(request)
    file = Path(os.environ[FOLDER]) / f"outcome{os.environ['RANK']}"
    file.write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    _main()
