"""How long `import manyhands` takes, with a list of the backends, as a ratio to NumPy, pluggy and pydantic alone.

Each run is a fresh interpreter that measures its own imports; the kinds take turns, so that all see the same
machine, and the medians are compared.

Usage: python benchmarks/startup.py [RUNS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

AIM = 1.5
CASES = {
    "numpy, pluggy, pydantic": "import numpy, pluggy, pydantic",
    # pydantic loads its parts when they are first named; whoever uses it at all names BaseModel.
    "the same, BaseModel named": "import numpy, pluggy, pydantic; pydantic.BaseModel",
    "manyhands, backends listed": "import manyhands; from manyhands.plugins import get_plugin_manager; get_plugin_manager().names()",
    "manyhands, a group made": "import manyhands; manyhands.init(config={}).close()",
}
PROGRAM = "from time import perf_counter as now; start = now(); {}; print(now() - start)"


def measure(statement: str, environ: dict[str, str]) -> float:
    """Return the seconds that ``statement`` takes in a fresh interpreter, the interpreter's own start left out."""
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)


def take_turns(runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run of each case."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    # Compiled files as users have them after the first import, also where the environment forbids to write them.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as compiled:
        environ["PYTHONPYCACHEPREFIX"] = compiled
        for statement in CASES.values():
            measure(statement, environ)
        for _ in range(runs):
            for name, statement in CASES.items():
                times[name].append(measure(statement, environ))
    return times


def main(runs: int) -> None:
    """Measure and print a small table."""
    times = take_turns(runs)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians["numpy, pluggy, pydantic"]
    print(f"{'what':<28}{'median':>10}{'fastest':>10}{'ratio':>8}   ({runs} runs each, taking turns)")
    for name, found in times.items():
        print(f"{name:<28}{medians[name] * 1e3:>7.0f} ms{min(found) * 1e3:>7.0f} ms{medians[name] / base:>8.2f}")
    print(f"aim: at most {AIM} with the backends listed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
