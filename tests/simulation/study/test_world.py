"""Hand cases of the pretend world: one grid of 2 pipelines by 2 stages, a step of 8 s without failures."""

import math
from dataclasses import replace

import pytest

from everstep.simulator.study.hazards import draw
from everstep.simulator.study.player import Costs
from everstep.simulator.study.policies import Policy, two_phase_value
from everstep.simulator.study.rules import PUBLISHED, RULES, SINGLES, Rules, named
from everstep.simulator.study.times import Job, Times, equal_layers
from everstep.simulator.study.world import Outcome, Truth, play
from everstep.trace import Change, Trace

JOB = Job(forward_s=(1.0,) * 2, work_s=(2.0,) * 2, num_micro_batches=8, num_stages=2, batch=8, longest=2)
TIMES = Times(JOB, "staggered")
FOUR = ("a", "b", "c", "d")
"""Start: pipelines a → b and c → d; four micro-batches of 2 s each on every node, so 8 samples in 8 s."""

REROUTE = Policy(named("reroute"), TIMES)
MOVE_BACK = Policy(
    Rules(name="heals", family="staggered", reroute="grid", moves=("heal",), ways=("blocking",), score="first"), TIMES,
)
BEHIND = Policy(replace(MOVE_BACK.rules, ways=("behind",)), TIMES)


def trace(*changes: Change, end_s: float = 200.0) -> Trace:
    return Trace(name="by hand", nodes=FOUR, changes=changes, end_s=end_s)


def test_without_changes_every_second_counts():
    outcome = play(trace(), REROUTE, Costs(move_s=10.0))
    assert (outcome.samples, outcome.fse, outcome.goodput, outcome.decisions) == (200.0, 1.0, 1.0, ())


def test_after_a_loss_the_peer_does_the_work_of_two():
    outcome = play(trace(Change(at_s=100.0, lost=("a",))), REROUTE, Costs(move_s=10.0))
    assert outcome.samples == 100.0 + 100.0 / 2
    assert outcome.whole_samples == 100.0 + 100.0 * 3 / 4
    assert [(taken.policy, taken.way) for taken in outcome.decisions] == [("reroute", "now")]


LOST_AND_BACK = (Change(at_s=50.0, lost=("a",)), Change(at_s=100.0, joined=("e",)))


def test_a_blocking_move_stops_training_for_its_time():
    outcome = play(trace(*LOST_AND_BACK), MOVE_BACK, Costs(move_s=20.0))      # a stage copy takes half of it
    assert outcome.samples == 50 + 50 / 2 + 90
    assert outcome.stall_s == 10


def test_a_move_behind_training_goes_on_at_the_old_pace_and_shows_a_moment():
    outcome = play(trace(*LOST_AND_BACK), BEHIND, Costs(move_s=20.0, exposed_s=2.0))
    assert outcome.samples == 50 + 50 / 2 + 10 / 2 + 88
    assert outcome.stall_s == 2


@pytest.mark.parametrize("policy", [MOVE_BACK, BEHIND])
def test_a_change_at_the_very_moment_a_move_is_through_breaks_it_off(policy: Policy):
    exposed_s = 0.0
    moves = trace(*LOST_AND_BACK, Change(at_s=110.0, lost=("e",)))
    outcome = play(moves, policy, Costs(move_s=20.0, exposed_s=exposed_s))
    trained_on = 10 / 2 if policy is BEHIND else 0
    assert outcome.samples == 50 + 50 / 2 + trained_on + 90 / 2


def test_progress_of_a_copy_can_be_kept_but_for_a_quarter():
    copies = trace(*LOST_AND_BACK, Change(at_s=130.0, joined=("f",)), end_s=300.0)
    lost, kept = (play(copies, BEHIND, Costs(move_s=80.0, exposed_s=0.0, keep_progress=keep)) for keep in (False, True))
    assert lost.samples == 50 + 50 / 2 + 30 / 2 + 40 / 2 + 130       # 30 s of the copy lost, 40 s again
    assert kept.samples == 50 + 50 / 2 + 30 / 2 + 10 / 2 + 160       # 10 s were left


def test_who_loses_a_layer_goes_back_to_the_last_checkpoint():
    both = trace(Change(at_s=50.0, lost=("a", "c")), Change(at_s=100.0, joined=("e", "f")))
    outcome = play(both, REROUTE, Costs(move_s=10.0, restart_s=30.0, checkpoint_every_s=20.0))
    assert outcome.lost_samples == 10
    assert [taken.policy for taken in outcome.decisions] == ["restore", "grow"]
    assert outcome.samples == 40 + 20 * 0.5 + 90       # two nodes from 80 s on at half the pace, four from 110 s on


def test_steps_redone_after_a_loss_cost_their_samples():
    outcome = play(trace(Change(at_s=100.0, lost=("a",))), REROUTE, Costs(move_s=10.0, redone_steps=0.5))
    assert outcome.lost_samples == 4
    assert outcome.samples == 100 + 100 / 2 - 4


def test_writing_checkpoints_takes_its_time():
    outcome = play(trace(), REROUTE, Costs(move_s=0.0, checkpoint_every_steps=5, checkpoint_write_s=10.0))
    assert outcome.stall_s == 40
    assert outcome.samples == 160


def test_the_truth_is_not_what_was_predicted_and_is_the_same_for_a_seed():
    steps = [play(trace(), REROUTE, Costs(move_s=10.0), truth=Truth(0.3, seed)).samples for seed in (1, 1, 2)]
    assert steps[0] == steps[1] != steps[2]
    assert steps[0] != 200.0


def test_a_policy_learns_the_truth_from_its_own_records():
    """Moving takes ten times as long as predicted: the second time that is known, and it stays."""
    class Slow(Truth):
        def factor(self, what: str) -> float:
            return 10.0 if what.startswith("move") else 1.0

    chooses = Policy(replace(MOVE_BACK.rules, score="value", knows_gap=True), TIMES)
    twice = trace(
        Change(at_s=10.0, lost=("a",)), Change(at_s=20.0, joined=("e",)), Change(at_s=1000.0, lost=("e",)),
        Change(at_s=1010.0, joined=("f",)), end_s=2000.0,
    )
    taken = [decision.way for decision in play(twice, chooses, Costs(move_s=50.0), truth=Slow(1e-9), gap_s=100.0).decisions]
    assert taken == ["now", "blocking", "now", "now"]


@pytest.mark.parametrize(("copy_s", "stall_s"), [(0.0, 0.0), (5.0, 1.0), (50.0, 2.0)])
def test_the_two_phase_value_is_the_integral_over_exponential_gaps(copy_s: float, stall_s: float):
    gap_s, now_s, then_s, width_s = 20.0, 3.0, 2.0, 0.002
    expected = 0.0
    for index in range(200_000):
        gap = (index + 0.5) * width_s
        gained = min(gap, copy_s) / now_s + max(0.0, gap - copy_s - stall_s) / then_s
        expected += gained * math.exp(-gap / gap_s) / gap_s * width_s
    assert two_phase_value(now_s, copy_s, then_s, stall_s, gap_s) == pytest.approx(expected, rel=1e-4)


FAMILIES = {family: Times(equal_layers(), family) for family in ("fused", "split", "staggered")}


def study(name: str, seed: int, move_s: float = 10.0, gap_s: float = 60.0, **more: object) -> Outcome:
    losses = draw("exponential", num_nodes=32, num_losses=10, gap_s=gap_s, seed=seed).from_first_change()
    policy = Policy(named(name), FAMILIES[named(name).family])
    return play(losses, policy, Costs(move_s=move_s), gap_s=gap_s, num_nodes=32, **more)


@pytest.mark.parametrize("name", RULES)
def test_every_policy_plays_through_ten_losses_the_same_way_twice(name: str):
    one, again = study(name, 5), study(name, 5)
    assert one == again
    assert len(one.decisions) == 10
    assert 0 < one.samples <= one.whole_samples * 1.1 or name in ("redundant", "restore", "varuna")


def test_choosing_is_better_than_every_single_policy_on_average_and_near_to_moving_for_free():
    total = {name: sum(study(name, seed).samples for seed in range(5)) for name in ("auto", "free", *SINGLES)}
    assert all(total["auto"] >= total[name] for name in SINGLES)
    assert 0.96 < total["auto"] / total["free"] < 1.001


@pytest.mark.parametrize(("against", "at_least"), [
    ("chameleon", 1.05), ("recycle", 1.05), ("plain-reroute", 1.08), ("oobleck", 0.96 * math.exp(10 / 60)), ("torchft", 1.0),
    ("parcae", 1.0), ("bamboo", 1.0), ("varuna", 1.0), ("oobleck-published", 1.25), ("reroute-published", 1.36),
    ("chameleon-published", 1.25),
])
def test_choosing_is_worth_what_it_must_be_against_each_system(against: str, at_least: float):
    ours, theirs = (sum(study(name, seed).samples for seed in range(5)) for name in ("auto", against))
    assert ours / theirs >= at_least


def test_where_predictions_are_wrong_choosing_still_comes_near_to_the_best_single_policy():
    ratios = []
    for seed in range(4):
        samples = {name: study(name, seed, truth=Truth(0.3, seed)).samples for name in ("auto", *SINGLES)}
        ratios.append(samples["auto"] / max(samples[name] for name in SINGLES))
    assert sum(ratios) / len(ratios) > 0.96


def test_published_systems_keep_their_own_schedules():
    assert all(named(name, "staggered").family == "fused" for name in PUBLISHED)
    assert named("auto", "split").family == "split"
