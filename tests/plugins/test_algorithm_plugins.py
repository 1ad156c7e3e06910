"""Algorithms of other distributions: proved when they are registered, chosen by the config and by table files, refused when wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import preloaded
from support.worlds import must, on_threads, thread_world

from oneaccord.api import (
    Algorithm,
    Buffer,
    Collective,
    ConfigError,
    Copy,
    Group,
    Recv,
    Reduce,
    Ref,
    Schedule,
    Send,
    ThreadWorld,
    hookimpl,
)
from oneaccord.config import load
from oneaccord.config.plugins import PluginManager, Switches, get_plugin_manager
from oneaccord.config.selection import make_selector
from oneaccord.errors import DuplicatePluginError, PluginError
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.errors import OrderError, ScheduleDeadlockError, ScheduleError
from oneaccord_lab.tuning.measure import measure
from oneaccord_lab.tuning.plan import Plan

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
ALL_REDUCE, BROADCAST, REDUCE = Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE


def install(name: str, site: Path) -> None:
    """Put an example package into a folder, as its wheel would."""
    project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
    shutil.copytree(PACKAGES / name / "src", site, dirs_exist_ok=True)
    info = site / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    for group, points in project["entry-points"].items():
        lines = [f"{point} = {module}\n" for point, module in points.items()]
        (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both example packages are installed."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("oneaccord-star", "oneaccord-comet"):
        install(name, folder)
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def oneaccord(site: Path, tmp_path: Path) -> Run:
    """Run the command line with the example packages, in an empty folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
        environ["PYTHONPATH"] = str(site)
        return preloaded.run(["-m", "oneaccord", *words], environ=environ, cwd=tmp_path)

    return run


PROGRAM = """
import numpy as np
import oneaccord as oa
from oneaccord.api import hookimpl
from oneaccord.config.plugins import get_plugin_manager

class Watch:
    used = {}

    @hookimpl
    def oneaccord_collective_finished(self, event):
        self.used[event.operation] = event.algorithm

watch = Watch()
get_plugin_manager().register(watch, "watch")
with oa.init(timeout_s=20) as group:
    sent = np.arange(5.0) + group.rank
    for root in range(group.world_size):
        assert (group.broadcast(sent, root) == np.arange(5.0) + root).all()
        total = group.reduce(sent, "sum", root)
        assert group.rank != root or (total == 3 * np.arange(5.0) + 3).all()
    if group.rank == 0:
        print(watch.used["broadcast"], watch.used["reduce"])
"""


def test_an_installed_algorithm_runs_over_tcp_when_the_config_names_it(oneaccord: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "oneaccord.toml").write_text('[algorithms]\nbroadcast = "star"\nreduce = "star"\n')
    answer = oneaccord("run", "--no-prefix", "-n", "3", "--backend", "tcp", "program.py")
    assert (answer.returncode, answer.stdout) == (0, "star star\n"), answer.stderr


def test_an_algorithm_that_was_refused_cannot_be_chosen_and_the_counterexample_is_told(oneaccord: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import oneaccord as oa\noa.init()\n")
    (tmp_path / "oneaccord.toml").write_text('[algorithms]\nbroadcast = "comet"\n')
    answer = oneaccord("run", "-n", "2", "--backend", "tcp", "program.py")
    assert answer.returncode == 1
    assert "ConfigError" in answer.stderr
    assert "algorithms.broadcast = 'comet'" in answer.stderr
    assert "world of 2, root 1, segments 1: WrongResultError: rank 0, output chunk 0" in answer.stderr


def test_doctor_shows_what_was_refused_and_what_is_right(oneaccord: Run) -> None:
    answer = oneaccord("doctor", "--json")
    assert answer.returncode == 0, answer.stderr
    errors = {each["name"]: each["error"] for each in json.loads(answer.stdout)["extensions"]}
    assert errors["star"] is None
    assert "the plugin 'comet' registers the algorithm 'comet' for broadcast, which is refused" in errors["comet"]
    assert "holds nothing; expected the contribution of rank 1 alone" in errors["comet"]


# What the verifier is asked


class Offer:
    """A plugin of this process."""

    def __init__(self, *algorithms: Any) -> None:
        self.algorithms = algorithms
        self.asked = 0

    @hookimpl
    def oneaccord_register_algorithms(self) -> Any:
        self.asked += 1
        return self.algorithms


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager(Switches(autoload=False))


def builtin(collective: Collective, name: str) -> Algorithm:
    return next(each for each in BUILTIN if (each.collective, each.name) == (collective, name))


RIGHT = replace(builtin(BROADCAST, "binomial"), name="mine")
RING = replace(builtin(Collective.ALL_REDUCE, "ring"), name="mine")
SEGMENTED = replace(builtin(BROADCAST, "chain"), name="mine")
GATHERING = replace(builtin(Collective.ALL_GATHER, "ring"), name="mine")


def lazy(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Return a schedule without any step."""
    return replace(RIGHT.schedule(rank, size, root, segments), steps=())


def only_small(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Be right in worlds of up to 4."""
    return lazy(rank, size, root, segments) if size > 4 else RIGHT.schedule(rank, size, root, segments)


def moody(calls: list[int]) -> Callable[..., Schedule]:
    """Return what gives another schedule each time."""

    def build(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
        calls.append(rank)
        return replace(RIGHT.schedule(rank, size, root, segments), algorithm=f"mine {len(calls)}")

    return build


def even_blocks(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    return builtin(Collective.ALL_TO_ALL, "bruck").schedule(rank, size, root, segments)


def wants_hosts(rank: int, size: int, root: int, segments: int, ranks_per_host: int) -> Schedule:
    """Be right unless hosts have three ranks."""
    return lazy(rank, size, root, segments) if ranks_per_host == 3 else RIGHT.schedule(rank, size, root, segments)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (replace(RIGHT, build=lazy), ["world of 1, root 0, segments 1: WrongResultError: rank 0, output chunk 0"]),
        (replace(RIGHT, build=only_small), ["world of 5, root 0, segments 1: WrongResultError"]),
        (replace(RING, ordered=True), ["world of 2, root 0", "OrderError", "the order of ranks is expected"]),
        (replace(RING, canonical=True), ["OrderError", "as in every reproducible reduction"]),
        (replace(RIGHT, build=moody([])), ["rank 0 gets another schedule when it is made a second time; it must be pure"]),
        (replace(RIGHT, build=lambda *_: 1 / 0), ["making its schedule raised ZeroDivisionError: division by zero"]),
        (replace(RIGHT, build=lambda *_: "schedule"), ["rank 0 gets 'schedule', which is not a Schedule"]),
        (replace(RIGHT, collective=REDUCE), ["has collective", "BROADCAST", "REDUCE"]),
        (replace(RIGHT, build=lambda rank, size, *_: RIGHT.schedule(rank, size)), ["root 1", "has root 0; expected 1"]),
        (
            Algorithm("mine", Collective.ALL_TO_ALL, even_blocks, ""),
            ["needs even blocks, but the algorithm does not claim even"],
        ),
        (replace(RIGHT, build=wants_hosts, by_host=True), ["world of 6, root 0, segments 1, 3 ranks per host: WrongResult"]),
        (
            replace(GATHERING, build=lambda rank, size, root, segments: GATHERING.schedule(rank, size)),
            ["world of 1, root 0, segments 2: its schedules cut each block into 1 segments"],
        ),
        (
            replace(GATHERING, build=lambda rank, size, *_: GATHERING.schedule(rank, size, 0, 3), segment_bytes=None),
            ["world of 1, root 0, segments 1: its schedules cut each block into 3 segments"],
        ),
    ],
)
def test_a_wrong_algorithm_is_refused_with_the_counterexample(
    manager: PluginManager, algorithm: Algorithm, words: list[str]
) -> None:
    manager.register(Offer(algorithm), "offer")
    assert manager.algorithms() == []
    error = manager.extension_errors()["offer"]
    assert isinstance(error, PluginError)
    key = (algorithm.collective.value, algorithm.name)
    for word in words:
        assert word in str(error)
        assert word in manager.refused_algorithms()[key]
    resolved = load({"algorithms": {key[0]: "mine"}}, environ={}, manager=manager)
    with pytest.raises(ConfigError, match="which was refused: world of"):
        make_selector(resolved, manager)
    assert make_selector(load({}, environ={}, manager=manager), manager).choose(algorithm.collective, 8, 4)


def test_the_error_is_chained_to_that_of_the_verifier(manager: PluginManager) -> None:
    manager.register(Offer(replace(RING, canonical=True)), "offer")
    refusal = manager.extension_errors()["offer"].__cause__
    assert isinstance(refusal, PluginError)
    assert isinstance(refusal.__cause__, OrderError)
    assert issubclass(OrderError, ScheduleError)


def test_a_wrong_algorithm_takes_no_right_one_with_it(manager: PluginManager) -> None:
    right, wrong = RIGHT, replace(RING, canonical=True)
    manager.register(Offer(wrong, right, "no algorithm"), "offer")
    assert manager.algorithms() == [right]
    assert set(manager.refused_algorithms()) == {("all_reduce", "mine"), ("no collective", "'no algorithm'")}


def exchange(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """In a world of two, let each rank write again to what it has sent, before it receives what the other one sends."""
    if size != 2:
        return builtin(ALL_REDUCE, "recursive_doubling").schedule(rank, size, root, segments)
    own, total = Ref(Buffer.INPUT, 0), Ref(Buffer.OUTPUT, 0)
    kept, came = Ref(Buffer.SCRATCH, 0), Ref(Buffer.SCRATCH, 1)
    operands = (kept, came) if rank == 0 else (came, kept)
    steps = (
        Copy(kept, own),
        Send(1 - rank, kept, (0,)),
        Copy(kept, own, (1,)),
        Recv(1 - rank, came),
        Reduce(total, *operands, (2, 3)),
    )
    return Schedule(ALL_REDUCE, "exchange", rank, size, 0, 1, 1, (own, own), steps)


EXCHANGE = Algorithm("exchange", ALL_REDUCE, exchange, "right, but not in its listed order")


@pytest.mark.parametrize("claim", [True, False])
def test_one_that_cannot_run_in_its_listed_order_is_refused_with_who_waits_for_whom(
    manager: PluginManager, claim: bool
) -> None:
    manager.register(Offer(replace(EXCHANGE, in_order=claim)), "offer")
    assert manager.algorithms() == []
    assert manager.refused_algorithms()["all_reduce", "exchange"] == (
        "world of 2, root 0, segments 1: the steps of 'exchange' cannot run in the order in which they are listed: "
        "one after the other, 4 of 10 steps can run, and then each of these ranks waits for the next: "
        "rank 0, step 2 (Copy) waits until rank 1 receives by step 3 the message that step 1 sends -> "
        "rank 1, step 2 (Copy) waits until rank 0 receives by step 3 the message that step 1 sends -> rank 0; "
        "list the steps so that each receive stands before the steps that wait for a send, if the peer may do the same"
    )
    refusal = manager.extension_errors()["offer"].__cause__
    assert isinstance(refusal, PluginError)
    assert isinstance(refusal.__cause__, ScheduleDeadlockError)
    resolved = load({"algorithms": {"all_reduce": "exchange"}}, environ={}, manager=manager)
    with pytest.raises(
        ConfigError, match="which was refused: world of 2, root 0, segments 1: the steps of 'exchange' cannot run"
    ):
        make_selector(resolved, manager)


def listed_well(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """As `exchange`, but each rank receives before it writes again to what it has sent."""
    made = exchange(rank, size, root, segments)
    if size != 2:
        return made
    first, send, again, receive, last = made.steps
    return replace(made, steps=(first, send, receive, again, last))


def test_the_same_steps_listed_so_that_they_can_run_are_taken_also_where_it_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = PluginManager(Switches())
    manager.register(Offer(Algorithm("exchange", ALL_REDUCE, listed_well, "", in_order=False)), "offer")
    monkeypatch.setattr("oneaccord.config.plugins.manager._process_manager", lambda: manager)

    def program(group: Group) -> float:
        # Too long for mailboxes and for buffers of the kernel: in another order, its steps would never end.
        return float(group.all_reduce(np.full(1 << 22, group.rank + 1.0)).sum())

    config = {"algorithms": {"all_reduce": "exchange"}}
    assert must(thread_world(program, 2, "tcp", timeout_s=10, config=config)) == [3.0 * (1 << 22)] * 2


def selfish(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """In worlds of 6 and 7, let each rank take what it gave for the result; no message could tell."""
    right = RING.schedule(rank, size, root, segments)
    if size not in (6, 7):
        return right
    return replace(right, steps=(Copy(Ref(Buffer.OUTPUT, 0, right.output_chunks), Ref(Buffer.INPUT, 0, right.input_chunks)),))


SELFISH = replace(RING, name="selfish", build=selfish)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Algorithm], None]:
    """Let a plugin of this process offer an algorithm."""

    def offer(algorithm: Algorithm) -> None:
        manager = PluginManager(Switches())
        manager.register(Offer(algorithm), "offer")
        monkeypatch.setattr("oneaccord.config.plugins.manager._process_manager", lambda: manager)
        assert algorithm in manager.algorithms()

    return offer


def test_one_that_is_wrong_in_the_world_of_the_call_is_refused_there_on_every_rank(
    offered: Callable[[Algorithm], None],
) -> None:
    offered(SELFISH)

    def program(group: Group) -> tuple[list[str], float, float]:
        heard = []
        for call in (group.all_reduce, lambda x: group.all_reduce_async(x).wait()):
            with pytest.raises(PluginError, match="holds contributions of rank") as caught:
                call(np.arange(8.0))
            heard.append(str(caught.value).split(": rank")[0])
        with group.split(color=group.rank // 3) as three:
            return heard, float(group.broadcast(np.full(1, group.rank), 4)[0]), float(three.all_reduce(np.ones(8))[0])

    words = (
        "the algorithm 'selfish' of a plugin for all_reduce is wrong here, and no byte was sent: world of 6, root 0, segments 1: "
        "WrongResultError"
    )
    answers = must(thread_world(program, 6, "tcp", config={"algorithms": {"all_reduce": "selfish"}}))
    assert answers == [([words, words], 4.0, 3.0)] * 6


def test_a_table_of_the_user_names_one(offered: Callable[[Algorithm], None], tmp_path: Path) -> None:
    offered(SEGMENTED)
    rows = ("[[broadcast]]", 'algorithm = "mine"', "segments = 2", "max_bytes = 64")
    (tmp_path / "table.toml").write_text("\n".join(rows))
    resolved = load({"selection": str(tmp_path / "table.toml")}, environ={})
    chooser = make_selector(resolved, get_plugin_manager())
    short, long = (chooser.choose(BROADCAST, nbytes, 3) for nbytes in (64, 65))
    assert (short.algorithm, short.segments) == (SEGMENTED, 2)
    assert long.algorithm in BUILTIN


def halting(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """In a world of 6, let each rank first trade its vector with a neighbour for nothing, in an order in which all wait for each other."""
    right = RING.schedule(rank, size, root, segments)
    if size != 6:
        return right
    assert not right.scratch
    own = Ref(Buffer.INPUT, 0, right.input_chunks)
    kept, came = Ref(Buffer.SCRATCH, 0, own.count), Ref(Buffer.SCRATCH, own.count, own.count)
    trade = (Copy(kept, own), Send(rank ^ 1, kept, (0,)), Copy(kept, own, (1,)), Recv(rank ^ 1, came))
    steps = (*trade, *(replace(step, after=(2, *(index + len(trade) for index in step.after))) for step in right.steps))
    return replace(right, scratch=(own, own), steps=steps)


def test_one_that_cannot_run_in_order_in_the_world_of_the_call_is_refused_there(offered: Callable[[Algorithm], None]) -> None:
    offered(replace(RING, name="halting", build=halting))

    def program(group: Group) -> str:
        with pytest.raises(PluginError) as caught:
            group.all_reduce(np.arange(8.0))
        return str(caught.value)

    answers = must(thread_world(program, 6, "tcp", config={"algorithms": {"all_reduce": "halting"}}))
    assert answers == answers[:1] * 6
    assert answers[0].startswith(
        "the algorithm 'halting' of a plugin for all_reduce is wrong here, and no byte was sent: world of 6, "
    )
    assert "the steps of 'halting' cannot run in the order in which they are listed: one after the other, 12 of" in answers[0]


def test_one_that_is_wrong_in_the_world_that_is_measured_is_left_out(
    offered: Callable[[Algorithm], None], capsys: pytest.CaptureFixture[str]
) -> None:
    offered(SELFISH)
    world = ThreadWorld(6, "tcp")

    def body(rank: int) -> list[str]:
        with world.rank(rank):
            _, [point] = measure(Plan({"all_reduce": ["selfish", "ring"]}, [8], 20.0, "tcp", "", rounds=3))
            return list(point.times)

    assert must(on_threads(body, 6)) == [["ring"]] * 6
    assert capsys.readouterr().err.startswith(
        "selfish is left out: the algorithm 'selfish' of a plugin for all_reduce is wrong here"
    )


def test_a_world_that_is_too_large_for_a_proof_is_told_in_the_log(
    offered: Callable[[Algorithm], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(replace(SELFISH, name="unproved"))
    monkeypatch.setattr("oneaccord.config.plugins.proving.BUDGET", 40)

    def program(group: Group) -> float:
        return float(group.all_reduce(np.full(8, group.rank))[0])

    config = {"algorithms": {"all_reduce": "unproved"}}
    assert must(thread_world(program, 7, "simulated", config=config)) == [float(rank) for rank in range(7)]
    [line] = [record.getMessage() for record in caplog.records if "unproved" in record.getMessage()]
    assert line.startswith(
        "the algorithm 'unproved' of a plugin for all_reduce is not proved here (world of 7, root 0, segments 1)"
    )


def test_what_registration_has_proved_and_what_comes_with_oneaccord_is_not_proved_again(
    offered: Callable[[Algorithm], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(replace(SELFISH, name="again"))
    proved: list[int] = []

    def count(algorithm: Algorithm, case: Any, budget: int | None = None) -> bool:
        proved.append(case.size)
        return True

    monkeypatch.setattr("oneaccord.config.plugins.proving._prove_case", count)

    def program(group: Group) -> None:
        group.all_reduce(np.ones(8))
        group.all_reduce(np.ones(9))
        group.barrier()

    for world in (3, 6):
        must(thread_world(program, world, "simulated", config={"algorithms": {"all_reduce": "again"}}))
    must(thread_world(program, 6, "simulated", config={"algorithms": {"all_reduce": "ring"}}))
    assert proved == [6]


def paced(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """In a world of three, let rank 0 write to what it sent first only after what it sends to another rank."""
    if size != 3:
        return builtin(ALL_REDUCE, "recursive_doubling").schedule(rank, size, root, segments)
    own, total = Ref(Buffer.INPUT, 0), Ref(Buffer.OUTPUT, 0)
    kept, came = Ref(Buffer.SCRATCH, 0), Ref(Buffer.SCRATCH, 1)
    steps: list[Any] = [
        [Copy(kept, own), Send(1, kept, (0,)), Send(2, None, (1,)), Reduce(kept, kept, own, (2,)), Recv(1, total, (0, 3))],
        [
            Recv(0, came),
            Reduce(came, came, own, (0,)),
            Recv(2, kept),
            Reduce(total, came, kept, (1, 2)),
            Send(0, total, (3,)),
            Send(2, total, (3,)),
        ],
        [Recv(0, None), Send(1, own), Recv(1, total, (1,))],
    ]
    return Schedule(ALL_REDUCE, "paced", rank, size, 0, 1, 1, (own, own), tuple(steps[rank]))


def test_what_a_long_message_reads_is_not_written_to_by_a_step_that_comes_after_another_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = PluginManager(Switches())
    manager.register(Offer(Algorithm("paced", ALL_REDUCE, paced, "")), "offer")
    monkeypatch.setattr("oneaccord.config.plugins.manager._process_manager", lambda: manager)

    def program(group: Group) -> tuple[float, float]:
        if group.rank == 1:
            group.compute(1.0)  # until then nobody takes what rank 0 sends
        total = group.all_reduce(np.full(10_000, group.rank + 1.0))
        return float(total.min()), float(total.max())

    assert must(thread_world(program, 3, "simulated", config={"algorithms": {"all_reduce": "paced"}})) == [(6.0, 6.0)] * 3
    assert manager.refused_algorithms() == {}


@pytest.mark.parametrize("name", ["hierarchical", "ring", "bruck"])
def test_what_comes_with_oneaccord_would_be_taken_from_a_plugin_too(manager: PluginManager, name: str) -> None:
    named = [replace(each, name="mine") for each in BUILTIN if each.name == name]
    assert named
    manager.register(Offer(*named), "offer")
    assert sorted(manager.algorithms(), key=named.index) == named, manager.extension_errors()


def test_a_name_that_is_taken_is_refused_and_the_one_that_has_it_stays(manager: PluginManager) -> None:
    manager.register(Offer(replace(RIGHT, name="binomial")), "one")
    manager.register(Offer(RIGHT), "two")
    manager.register(Offer(RIGHT, replace(SEGMENTED, name="other"), replace(RIGHT, name="other")), "three")
    assert sorted(each.name for each in manager.algorithms()) == ["mine", "other"]
    assert "oneaccord already has an algorithm of that name" in str(manager.extension_errors()["one"])
    assert isinstance(manager.extension_errors()["one"].__cause__, DuplicatePluginError)
    assert "'mine' for broadcast, which is refused: another plugin already has an algorithm" in str(
        manager.extension_errors()["three"]
    )
    assert "'other' for broadcast, which is refused: this plugin already has an algorithm" in str(
        manager.extension_errors()["three"]
    )
    assert "two" not in manager.extension_errors()
    chooser = make_selector(load({"algorithms": {"broadcast": "binomial"}}, environ={}, manager=manager), manager)
    assert chooser.choose(BROADCAST, 8, 4).algorithm is builtin(BROADCAST, "binomial")


def test_each_plugin_is_asked_and_each_algorithm_proved_once(manager: PluginManager) -> None:
    made: list[int] = []

    def build(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
        made.append(rank)
        return RIGHT.schedule(rank, size, root, segments)

    first = Offer(replace(RIGHT, build=build))
    manager.register(first, "first")
    before = manager.algorithms()
    count = len(made)
    assert manager.algorithms() == before
    assert (first.asked, len(made)) == (1, count)
    manager.register(Offer(replace(SEGMENTED, name="later")), "later")
    assert [each.name for each in manager.algorithms()] == ["mine", "later"]
    assert (first.asked, len(made)) == (1, count)


def test_nobody_pays_for_the_verifier_without_such_a_plugin(run_python: Run) -> None:
    program = (
        "import sys\nfrom oneaccord.config.plugins import PluginManager, Switches\n"
        "assert PluginManager(Switches(autoload=False)).algorithms() == []\n"
        "print('oneaccord.schedule.proof.verify' in sys.modules)\n"
    )
    answer = run_python("-c", program)
    assert (answer.stdout, answer.stderr) == ("False\n", "")


def test_a_step_that_reads_what_is_not_there_is_told(manager: PluginManager) -> None:
    def build(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
        wild = (Copy(Ref(Buffer.OUTPUT, 7), Ref(Buffer.INPUT, 0)), Send(size, Ref(Buffer.INPUT, 0)))
        return replace(RIGHT.schedule(rank, size, root, segments), steps=wild)

    manager.register(Offer(replace(RIGHT, build=build)), "offer")
    manager.algorithms()
    assert "MalformedScheduleError" in str(manager.extension_errors()["offer"])
