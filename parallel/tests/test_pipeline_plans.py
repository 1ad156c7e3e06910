"""Plans of pipelines: what they promise, as exact numbers; what the proof finds; pictures."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from fractions import Fraction
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord.api import NETWORKS, Paths
from oneaccord.errors import PluginError, UsageError
from oneaccord_parallel.pipeline import schedules
from oneaccord_simulated import run

SIZES = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 5, 8, 16)]
INTERLEAVED = [(stages, turns * stages, virtual) for stages in range(1, 9) for turns in (1, 2, 3) for virtual in (1, 2, 3)]
F, B, B1, B2 = "forward", "backward", "backward_input", "backward_weight"


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(schedules, "_registered", {})


def replaced(plan, rank, change):
    """Return a plan in which the actions of one rank are changed."""
    actions = [list(each) for each in plan.actions]
    change(actions[rank])
    return dataclasses_replace(plan, actions)


def dataclasses_replace(plan, actions):
    return mp.Plan(plan.name, plan.microbatches, actions, plan.placement, plan.promised_peak)


@pytest.mark.parametrize(("name", "peak"), [("gpipe", lambda p, m, r: m), ("1f1b", lambda p, m, r: min(m, p - r))])
def test_gpipe_and_1f1b_are_as_idle_as_each_other_and_hold_what_the_papers_say(name, peak):
    for stages, microbatches in SIZES:
        plan = mp.schedule(name, stages, microbatches)
        for times in [(1, 1), (1, 2), (Fraction(2, 3), 1.5)]:
            assert plan.bubble(*times) == Fraction(stages - 1, microbatches + stages - 1)
        assert plan.peak() == tuple(peak(stages, microbatches, rank) for rank in range(stages)) == plan.promised_peak


def test_interleaving_divides_the_bubble_and_adds_activations():
    for stages, microbatches, virtual in INTERLEAVED:
        plan = mp.schedule("interleaved_1f1b", stages, microbatches, virtual)
        assert plan.bubble() == Fraction(stages - 1, virtual * microbatches + stages - 1)
        assert plan.peak() == plan.promised_peak
        first = Fraction(plan.peak()[0], virtual)
        assert first == min(microbatches, stages + Fraction(stages - 1, virtual))


def test_zb_h1_fills_the_bubble_with_the_gradients_of_weights():
    for stages, microbatches in SIZES:
        plan = mp.schedule("zb_h1", stages, microbatches)
        assert plan.peak() == plan.promised_peak == (min(stages, microbatches),) * stages
        if microbatches >= stages:
            for forward, inputs, weights in [(1, 1, 1), (1, 2, 1), (5, 3, 2)]:
                timeline = plan.timeline(forward, inputs + weights, weights)
                assert timeline.idle == ((stages - 1) * (forward + inputs - weights),) * stages


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]), st.integers(1, 8), st.integers(1, 16), st.integers(1, 3)
)
def test_every_pass_is_done_once_after_what_it_needs(name, stages, microbatches, virtual):
    if name == "interleaved_1f1b":
        microbatches *= stages
    plan = mp.schedule(name, stages, microbatches, virtual if name == "interleaved_1f1b" else 1)
    found = Counter(action for actions in plan.actions for action in actions)
    halves = (B1, B2) if name == "zb_h1" else (B,)
    every = {mp.Action(kind, m, s) for kind in (F, *halves) for m in range(microbatches) for s in range(plan.virtual_stages)}
    assert found == Counter(every)
    spans = {span.action: span for spans in plan.timeline().spans for span in spans}
    for action, span in spans.items():
        before = {F: (F, -1), B: (B, 1), B1: (B1, 1), B2: (B1, 0)}[action.kind]
        need = mp.Action(before[0], action.microbatch, action.stage + before[1])
        assert need not in spans or spans[need].end <= span.start
    assert mp.prove(plan).peak == plan.peak()


def test_the_messages_follow_from_the_actions():
    plan = mp.schedule("1f1b", 2, 2)
    assert plan.steps(1) == (
        mp.Message("activation", 0, 1, 0, 1),
        mp.Action(F, 0, 1),
        mp.Action(B, 0, 1),
        mp.Message("gradient", 0, 0, 1, 0),
        mp.Message("activation", 1, 1, 0, 1),
        mp.Action(F, 1, 1),
        mp.Action(B, 1, 1),
        mp.Message("gradient", 1, 0, 1, 0),
    )
    assert Counter(plan.steps(0)) & Counter(plan.steps(1)) == Counter(s for s in plan.steps(1) if isinstance(s, mp.Message))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "ahead"),
    [("gpipe", 4, 8, 0), ("1f1b", 4, 8, 1), ("zb_h1", 4, 8, 1), ("interleaved_1f1b", 4, 8, 2), ("interleaved_1f1b", 8, 8, 1)],
)
def test_so_far_ahead_receives_must_be_issued_if_sends_block(name, stages, microbatches, ahead):
    assert mp.prove(mp.schedule(name, stages, microbatches)).ahead == ahead


def test_a_plan_of_which_ranks_run_far_ahead_is_right_too():
    stages, microbatches = 2, 8
    actions = [
        [(F, m, s) for s in (rank, rank + stages) for m in range(microbatches)]
        + [(B, m, s) for s in (rank + stages, rank) for m in range(microbatches)]
        for rank in range(stages)
    ]
    proof = mp.prove(mp.Plan("breadth first", microbatches, actions, [0, 1, 0, 1]))
    assert proof.peak == (16, 16)
    assert proof.ahead > 2


def test_messages_do_not_overtake_each_other():
    # The second rank wants the last activation first: it must issue all receives for it, and the sends before it then end.
    microbatches = 6
    order = [microbatches - 1, *range(microbatches - 1)]
    actions = [
        [(F, m, 0) for m in range(microbatches)] + [(B, m, 0) for m in order],
        [(kind, m, 1) for m in order for kind in (F, B)],
    ]
    assert mp.prove(mp.Plan("last first", microbatches, actions)).ahead == 0


@pytest.mark.parametrize(
    ("rank", "change", "error", "said"),
    [
        (1, lambda a: a.remove((B, 2, 1)), mp.MissingActionError, "rank 1 never does the backward of microbatch 2 in stage 1"),
        (0, lambda a: a.remove((F, 3, 0)), mp.MissingActionError, "never does the forward of microbatch 3"),
        (2, lambda a: a.append((F, 0, 2)), mp.RepeatedActionError, "does the forward of microbatch 0 in stage 2 twice, as its actions"),
        (2, lambda a: a.append((B1, 0, 2)), mp.RepeatedActionError, "twice"),
        (2, lambda a: a.append((B2, 0, 2)), mp.RepeatedActionError, "and the whole backward as well"),
        (0, lambda a: a.append((F, 0, 1)), mp.MalformedPlanError, "that stage is on rank 1"),
        (0, lambda a: a.append((F, 4, 0)), mp.MalformedPlanError, "the microbatches are 0 to 3"),
        (0, lambda a: a.append((F, 0, 7)), mp.MalformedPlanError, "the stages are 0 to 2"),
        (0, lambda a: a.append(("sideways", 0, 0)), mp.MalformedPlanError, "the kinds are forward, backward, backward_input"),
        (0, lambda a: a.reverse(), mp.PlanDeadlockError, "before the forward of microbatch 3 in stage 0 of rank 0, which comes later"),
        (2, lambda a: a.insert(0, a.pop(1)), mp.PlanDeadlockError, "rank 2 cannot begin its action 0"),
        (0, lambda a: a.sort(key=lambda each: each.kind == B), mp.PlanPeakError, "rank 0 holds 4 activations at once, and 3 are"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_with_a_counterexample(rank, change, error, said):
    plan = mp.schedule("1f1b", 3, 4)
    with pytest.raises(error, match=said):
        mp.prove(replaced(plan, rank, change))


def test_a_wrong_plan_has_no_timeline():
    with pytest.raises(mp.PlanDeadlockError, match=r"mp\.prove says why"):
        mp.Plan("backwards", 1, [[(B, 0, 0), (F, 0, 0)]]).bubble()
    with pytest.raises(mp.MalformedPlanError, match=r"mp\.prove says why"):
        mp.Plan("nowhere", 1, [[(F, 0, 0)], [(F, 0, 1)]], [0]).svg()


def test_ranks_that_wait_for_each_other_are_named():
    # Rank 0 wants the first gradient before it sends the second activation, rank 1 both activations before any gradient.
    actions = [[(F, 0, 0), (B, 0, 0), (F, 1, 0), (B, 1, 0)], [(F, 0, 1), (F, 1, 1), (B, 0, 1), (B, 1, 1)]]
    with pytest.raises(mp.PlanDeadlockError) as caught:
        mp.prove(mp.Plan("crossed", 2, actions))
    assert str(caught.value) == (
        "crossed: 2 stages, 2 microbatches: rank 0 cannot begin its action 1, backward of microbatch 0 in stage 0, before the backward of "
        "microbatch 0 in stage 1 of rank 1; rank 1 cannot begin its action 1, forward of microbatch 1 in stage 1, before the forward of "
        "microbatch 1 in stage 0 of rank 0, and none of them can continue"
    )


@pytest.mark.parametrize(
    "plan",
    [
        mp.Plan("half", 1, [[(F, 0, 0), (B1, 0, 0)]]),
        mp.Plan("nothing", 0, [[]]),
        mp.Plan("nowhere", 1, [[]], []),
        mp.Plan("beyond", 1, [[(F, 0, 0), (B, 0, 0)]], [1]),
        mp.Plan("promises", 1, [[(F, 0, 0), (B, 0, 0)]], None, [1, 1]),
    ],
)
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(mp.PlanError):
        mp.prove(plan)


def test_plans_are_plain_data():
    plan = mp.schedule("1f1b", 2, 2)
    assert plan == mp.Plan("1f1b", 2, [[tuple(a) for a in each] for each in plan.actions], [0, 1], [2, 1])
    assert hash(plan) == hash(mp.schedule("1f1b", 2, 2))
    assert {field.name for field in dataclasses.fields(plan)} == {
        "name",
        "microbatches",
        "actions",
        "placement",
        "promised_peak",
    }
    numbers = np.arange(2)
    assert plan == mp.Plan(
        "1f1b", np.int64(2), [[(k, numbers[m], s) for k, m, s in each] for each in plan.actions], numbers, [2, 1]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (1, [(F, 0, 0)]),
        (1.5, [[(F, 0, 0), (B, 0, 0)]]),
        (None, [[(F, 0, 0), (B, 0, 0)]]),
        (1, [[(F, 0.0, 0), (B, 0, 0)]]),
        (1, [[(F, 0, 0, 0)]]),
        (1, [[(F, 0)]]),
        (1, [["abc"]]),
        (1, None),
        (1, [[(F, 0, 0), (B, 0, 0)]], "0"),
        (1, [[(F, 0, 0), (B, 0, 0)]], None, 1),
        (1, [[(F, 0, 0), (B, 0, 0)]], None, [1.0]),
    ],
)
def test_what_is_no_such_data_is_no_plan(arguments):
    with pytest.raises(
        mp.MalformedPlanError, match=r"odd: a plan has a number of microbatches, a list of actions .* of integers: "
    ):
        mp.Plan("odd", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 4, 8), "there is no schedule '1f2b'; did you mean '1f1b'"),
        (("1f1b", 0, 8), "stages=0"),
        ((["1f1b"], 4, 8), "a schedule has a name"),
        (("1f1b", 4, 2.0), "microbatches=2.0"),
        (("1f1b", 4, 8, 2), "1f1b has one stage on each rank, but virtual=2 was given"),
        (("interleaved_1f1b", 4, 6), "6 is not a multiple of 4"),
    ],
)
def test_sizes_that_a_schedule_does_not_have_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        mp.schedule(*arguments)


@pytest.mark.parametrize("times", [(-1, 2), (1, float("nan")), (1, "two"), (1, 2, 3)])
def test_impossible_times_are_refused(times):
    with pytest.raises(UsageError, match=r"duration|must not be more"):
        mp.schedule("1f1b", 2, 2).bubble(*times)


def test_a_message_makes_a_pipeline_longer():
    plan = mp.schedule("gpipe", 4, 1)
    assert plan.timeline(1, 2, message=10).makespan == 4 * 3 + 6 * 10
    assert plan.timeline(1, 2, message=lambda message: 10 * message.dest).makespan == 4 * 3 + 10 * (1 + 2 + 3 + 2 + 1 + 0)
    assert plan.bubble(1, 2, message=10) == 1 - Fraction(3, 4 * 3 + 6 * 10)
    assert 'data-end="78"' in plan.svg(1, 2, message=11)
    assert ".  .  F0" in plan.text(1, 2, message=1)


def test_a_pipeline_on_a_network_takes_the_time_of_its_messages():
    plan, nbytes = mp.schedule("1f1b", 4, 8), 1 << 20
    paths = Paths(NETWORKS["textbook"], plan.stages)
    timeline = plan.timeline(1e-3, 2e-3, message=lambda each: paths.between(each.source, each.dest).flight_s(nbytes))

    def body(group):
        def timed(seconds, result):
            group.compute(seconds)
            return result

        stage = mp.Stage(lambda x: timed(1e-3, (x, x)), lambda x, dy: timed(2e-3, (dy, {})))
        x = np.zeros(plan.microbatches * nbytes, np.uint8)
        mp.Pipeline(group, [stage], plan).step(x, loss=lambda output, _: (0.0, output))

    # The rest is what the ranks say to each other before and after: some messages of a microsecond.
    assert run(body, plan.stages, network="textbook").duration_s == pytest.approx(float(timeline.makespan), rel=0.01)


def serial(stages, microbatches):
    """One microbatch after the other."""
    return mp.Plan("serial", microbatches, [[(k, m, r) for m in range(microbatches) for k in (F, B)] for r in range(stages)])


@pytest.mark.usefixtures("registry")
def test_a_schedule_of_somebody_else_is_proved_before_it_is_known():
    mp.register_schedule("serial", serial)
    mp.register_schedule("serial", serial)
    assert mp.schedule("serial", 3, 2).bubble() == Fraction(2, 3)
    assert mp.schedules()["serial"] == "One microbatch after the other."
    with pytest.raises(UsageError, match="one stage on each rank"):
        mp.schedule("serial", 3, 2, virtual=2)
    with pytest.raises(UsageError, match="there is already a schedule 'serial'"):
        mp.register_schedule("serial", lambda stages, microbatches: None)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda p, m: dataclasses_replace(serial(p, m), [a[:-1] if m == 8 else a for a in serial(p, m).actions]), mp.MissingActionError),
        (lambda p, m: serial(p, m + 1), UsageError),
        (lambda p, m: mp.Plan("odd", m, [[(F, 0.5, 0)]] * p), mp.MalformedPlanError),
        (lambda p, m: None, UsageError),
        (lambda p, m: mp.schedule("nothing", p, m), UsageError),
        (lambda p: None, PluginError),
    ],
)  # fmt: skip
def test_a_wrong_schedule_is_not_registered(function, error):
    with pytest.raises(error):
        mp.register_schedule("mine", function)
    with pytest.raises(UsageError, match="there is no schedule 'mine'"):
        mp.schedule("mine", 2, 2)


@pytest.mark.usefixtures("registry")
def test_a_registered_schedule_is_proved_each_time():
    def right_when_small(stages, microbatches):
        plan = serial(stages, microbatches)
        return plan if microbatches < 20 else replaced(plan, 0, lambda actions: actions.pop())

    mp.register_schedule("small", right_when_small)
    with pytest.raises(mp.MissingActionError):
        mp.schedule("small", 2, 20)


@pytest.mark.usefixtures("registry")
def test_schedules_come_by_entry_point(monkeypatch):
    class Entry:
        name, value, dist = "serial", "elsewhere:serial", None

        def load(self):
            return serial

    entries = [Entry()]
    monkeypatch.setattr(schedules, "entry_points", lambda group, name=None: entries if name in {None, "serial"} else [])
    assert mp.schedules()["serial"] == "of elsewhere:serial"
    assert mp.schedule("serial", 2, 2).peak() == (1, 1)


def test_a_plan_is_drawn_with_characters():
    assert mp.schedule("1f1b", 3, 3).text(width=70).splitlines() == [
        "1f1b: 3 stages, 3 microbatches",
        "idle 2/5 = 40.0 % of the time; activations held at most: 3, 2, 1",
        "",
        "rank 0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---",
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .",
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .",
        "",
        "F forward; B backward; . idle",
    ]


@pytest.mark.parametrize("times", [(1, 10**400), (Fraction(1, 10**30), 2), (1, Fraction(10**9, 7))])
def test_pictures_have_an_end_whatever_the_times_are(times):
    plan = mp.schedule("1f1b", 2, 2)
    assert len(plan.text(*times)) < 5000
    assert len(plan.svg(*times)) < 20_000


def test_a_plan_that_is_wrong_can_be_drawn_if_all_of_it_can_begin():
    assert "B0" in mp.Plan("nowhere", 1, [[(F, 0, 0), (B, 0, 0)]], [7]).text()


def test_text_fits_the_width_and_any_times():
    plan = mp.schedule("interleaved_1f1b", 2, 4)
    text = plan.text(1, 2.1, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "F0a" in text
    assert "B3b" in text
    plain = plan.text(width=70)
    coloured = plan.text(width=70, colour=True)
    assert "\x1b[38;2;0;114;178m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == plain.split()


def test_the_picture_has_every_action_once_and_is_the_same_each_time():
    plan = mp.schedule("zb_h1", 3, 4)
    drawn = plan.svg(1, 2, 1)
    assert drawn == mp.schedule("zb_h1", 3, 4).svg(1, 2, 1)
    root = ET.fromstring(drawn)
    found = [
        (int(row.get("data-rank")), each.get("data-kind"), int(each.get("data-microbatch")), Fraction(each.get("data-start")))
        for row in root.iter("{http://www.w3.org/2000/svg}g")
        if row.get("class") == "rank"
        for each in row
        if each.get("class") == "action"
    ]
    spans = plan.timeline(1, 2, 1).spans
    assert found == [(rank, s.action.kind, s.action.microbatch, s.start) for rank, each in enumerate(spans) for s in each]
