"""The planner in the loop: what it decides is played, and takes what its cost model says."""

from dataclasses import replace

import pytest

from everstep.catalog import files
from everstep.planner.layouts.search import priced
from everstep.planner.step.memory import node_bytes
from everstep.quantities import NodeId
from everstep.simulator.study.compare import compare
from everstep.simulator.study.hazards import draw
from everstep.simulator.study.planned import Planned, Running
from everstep.simulator.study.player import Costs, Situation
from everstep.simulator.study.policies import Policy
from everstep.simulator.study.roster import SEATS, Table, equal_ground, fastest_grid, ground_of, table_of
from everstep.simulator.study.rules import named
from everstep.simulator.study.times import FAMILIES, Family, Times, equal_layers
from everstep.simulator.study.world import Outcome, Truth, play
from everstep.trace import Change, Trace

COSTS = Costs(move_s=40.0, exposed_s=1.0)
SMALL = {"num_pipelines": 3, "num_stages": 2, "num_layers": 8, "micro_batches": 4}
GROUNDS = {family: equal_ground(family, COSTS, **SMALL) for family in FAMILIES}
TABLE = Table(plain=GROUNDS, twice={family: equal_ground(family, COSTS, copies=2, **SMALL) for family in FAMILIES})
SIX = tuple(f"n{number}" for number in range(6))


def player(name: str, family: Family = "split") -> Planned:
    return TABLE.seated([name], family)[0]


def trace(*changes: Change, end_s: float = 1000.0) -> Trace:
    return Trace(name="by hand", nodes=SIX, changes=changes, end_s=end_s)


def played(name: str, *changes: Change, costs: Costs = COSTS, truth: Truth | None = None, end_s: float = 1000.0) -> Outcome:
    return play(trace(*changes, end_s=end_s), player(name), costs, truth=truth)


def started(who: Planned) -> Running:
    found = who.start(SIX)
    assert found is not None
    return found


def test_the_job_of_the_studies_takes_ten_seconds_a_step_and_half_of_tau_for_a_stage():
    ground = equal_ground("fused", COSTS)
    grid = ground.grid([f"n{number}" for number in range(32)])
    assert grid is not None
    assert ground.step_s(grid) == pytest.approx(10.0)
    stage_bytes = sum(ground.workload.units[name].state_bytes for name in ground.workload.units_of(set(range(8))))
    assert ground.cluster.link.seconds(stage_bytes) == pytest.approx(20.0)


@pytest.mark.parametrize("family", ["fused", "split", "staggered"])
def test_no_node_may_need_more_than_the_fullest_of_the_grid(family: Family):
    ground = GROUNDS[family]
    grid = ground.grid(SIX)
    assert grid is not None
    needed = node_bytes(grid, ground.workload)
    assert ground.config.worker_memory_bytes == max(needed.values())


def test_without_changes_a_step_takes_what_the_cost_model_says():
    who = player("auto")
    plan = started(who).plan
    step_s = priced(plan, who.ground.workload, who.ground.cluster_of(SIX)).step_s
    outcome = played("auto")
    assert outcome.samples == pytest.approx(1000.0 / step_s * who.batch)
    assert outcome.fse == pytest.approx(1.0)


def test_a_loss_is_answered_with_the_planner_s_plan_after_the_time_of_a_switch():
    who = player("reroute")
    before = started(who)
    left = before.without(["n0"])
    option = who.react(Situation(layout=left, gap_s=600.0, seen_gap_s=600.0, costs=COSTS, lost=("n0",)))
    assert (option.policy, option.way, option.pause_s, option.moves) == ("reroute", "now", 1.0, "")
    after_s = priced(option.target.plan, who.ground.workload, who.ground.cluster_of(left.nodes)).step_s
    outcome = played("reroute", Change(at_s=500.0, lost=("n0",)))
    steps = 500.0 / who.step_s(before) + (500.0 - option.pause_s) / after_s
    assert outcome.samples == pytest.approx(steps * who.batch)
    assert outcome.stall_s == option.pause_s


def test_a_blocking_move_takes_its_bytes_over_the_links():
    who = player("repartition")
    left = started(who).without(["n0"])
    option = who.react(Situation(layout=left, gap_s=600.0, seen_gap_s=600.0, costs=COSTS, lost=("n0",)))
    assert option.way == "blocking"
    received = dict.fromkeys(left.nodes, 0)
    for node, units in option.target.holds.items():
        received[node] = sum(who.ground.workload.units[name].state_bytes for name in units - left.holds[node])
    assert max(received.values()) > 0
    assert option.stall_s >= who.ground.cluster.link.seconds(max(received.values())) * 0.999
    assert max(at_s for at_s, _, _ in option.arrivals) == pytest.approx(option.stall_s)


def test_a_change_before_a_move_is_through_leaves_the_old_layout():
    outcome = played("repartition", Change(at_s=500.0, lost=("n0",)), Change(at_s=501.5, lost=("n3",)))
    assert [taken.at_s for taken in outcome.decisions] == [500.0, 501.5]
    who = player("repartition")
    left = started(who).without(["n0", "n3"])
    wanted = who.react(Situation(layout=left, gap_s=600.0, seen_gap_s=600.0, costs=COSTS))
    assert outcome.decisions[-1].step_s == wanted.step_s


def test_with_progress_kept_what_had_arrived_is_not_sent_again():
    who = player("repartition")
    left = started(who).without(["n0"])
    situation = Situation(layout=left, gap_s=600.0, seen_gap_s=600.0, costs=COSTS, lost=("n0",))
    option = who.react(situation)
    half = who.kept(option, option.stall_s / 2, left)
    assert half.plan is left.plan
    assert any(half.holds[node] > left.holds[node] for node in left.nodes)
    assert 0 < who.react(replace(situation, layout=half)).stall_s < option.stall_s


def test_all_holders_of_a_layer_lost_means_a_restore_and_the_work_since_the_checkpoint():
    all_first_stages = Change(at_s=500.0, lost=("n0", "n2", "n4"))
    outcome = played("auto", all_first_stages, costs=replace(COSTS, checkpoint_every_s=200.0))
    assert [taken.way for taken in outcome.decisions] == ["restore"]
    who = player("auto")
    assert outcome.lost_samples == pytest.approx(100.0 / who.step_s(started(who)) * who.batch)


def test_too_few_nodes_wait_for_others():
    outcome = played("auto", Change(at_s=100.0, lost=SIX[1:]), Change(at_s=300.0, joined=("n6", "n7")))
    assert [taken.way for taken in outcome.decisions] == ["wait", "restore"]


def test_free_stands_still_for_nothing_and_is_at_least_as_good():
    changes = [Change(at_s=100.0 * (number + 1), lost=(f"n{number}",)) for number in (0, 3)]
    free, auto = played("free", *changes), played("auto", *changes)
    assert free.stall_s == pytest.approx(0.0, abs=1e-9)
    assert free.samples > auto.samples


def test_a_slow_node_is_known_after_the_first_step_and_not_before():
    class Slow(Truth):
        def factor(self, what: str) -> float:
            return 2.0 if what in ("node n1", "node n6") else 1.0

    who, seen = player("auto"), []
    watched = who.__class__.react
    changes = Change(at_s=100.0, lost=("n0",)), Change(at_s=200.0, joined=("n6",))

    def react(self: Planned, situation: Situation[Running]) -> object:
        seen.append({name for name, ratio in situation.seen.items() if name.startswith("node") and ratio != 1.0})
        return watched(self, situation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planned, "react", react)
        play(trace(*changes), who, COSTS, truth=Slow(1e-9))
    assert seen == [{"node n1"}, {"node n1"}]


def test_kinds_of_plans_that_take_longer_are_predicted_to_after_they_ran():
    class Longer(Truth):
        def factor(self, what: str) -> float:
            return 1.5 if what.startswith("step rerouted") else 1.0

    steps = [taken.step_s for taken in played(
        "reroute", Change(at_s=100.0, lost=("n0",)), Change(at_s=400.0, lost=("n3",)), truth=Longer(1e-9),
    ).decisions]
    true = [taken.step_s for taken in played(
        "reroute", Change(at_s=100.0, lost=("n0",)), Change(at_s=400.0, lost=("n3",)),
    ).decisions]
    assert steps[0] == pytest.approx(true[0])
    assert steps[1] == pytest.approx(1.5 * true[1])


@pytest.mark.parametrize("name", sorted(SEATS))
def test_every_player_lives_through_losses_and_joins(name: str):
    hard = draw("bursty", num_nodes=6, num_losses=8, gap_s=60.0, seed=3, back_after_s=50.0)
    report = compare([hard], [player(name)], COSTS, num_nodes=6)
    assert 0 < report.rows[name].fse <= 1.2
    assert report.outcomes[name][0].elapsed_s == hard.end_s


@pytest.mark.parametrize("family", ["fused", "split"])
def test_on_whole_and_on_stage_rerouted_grids_forms_and_planner_agree_within_a_per_cent(family: Family):
    """Where closed forms are exact: enough slots, no losses at one stage of which the work is no whole number."""
    ground = equal_ground(family, COSTS, micro_batches=32)
    times = Times(equal_layers(micro_batches=32), family)
    whole = ground.grid([f"n{number}" for number in range(32)])
    assert whole is not None
    bounds = times.grid_bounds()
    assert ground.step_s(whole) == pytest.approx(times.grid_s(bounds, 8, (0, 0, 0, 0)), rel=0.01)
    if family == "split":
        who = Planned(name="reroute", policy="reroute", ground=ground, starts_on_grid=True)
        for lost, holes in ((("n4",), (1, 0, 0, 0)), (("n5", "n10"), (0, 1, 1, 0))):
            left = ground.running(whole).without(lost)
            option = who.react(Situation(layout=left, gap_s=600.0, seen_gap_s=600.0, costs=COSTS, lost=lost))
            assert who.step_s(option.target) == pytest.approx(times.grid_s(bounds, 8, holes), rel=0.01)


def test_the_same_losses_are_worth_the_same_by_forms_and_by_the_planner_within_a_per_cent():
    costs = Costs(move_s=10.0, exposed_s=0.0)
    once = draw("exponential", num_nodes=32, num_losses=1, gap_s=600.0, seed=1).from_first_change()
    ground = equal_ground("split", costs, micro_batches=32)
    by_planner = Planned(name="planner", policy="reroute", ground=ground, starts_on_grid=True)
    by_forms = Policy(replace(named("reroute", "split"), name="forms"), Times(equal_layers(micro_batches=32), "split"))
    report = compare([once], [by_planner, by_forms], costs, num_nodes=32)
    assert report.ratio("planner", "forms") == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("workload", ["workload-gpt-6.7b", "workload-tiny-gpt"])
def test_a_move_figure_slows_state_down_and_nothing_else(workload: str):
    """Also where sums are so small that they could get lost in rounding."""
    cluster, job = files.load_cluster("cluster-32"), files.load_workload(workload)
    plain, slowed = (ground_of(cluster, job, 4, "split", move_s) for move_s in (None, 3600.0))
    assert replace(slowed, move_ratio=1.0) == plain
    grid = plain.grid(list(cluster.nodes))
    assert grid is not None
    who = Planned(name="spare", policy="spare", ground=slowed, reserve=2, starts_on_grid=True)
    running = who.start(tuple(cluster.nodes))
    assert running is not None
    first = running.busy[0]
    costs = Costs(move_s=3600.0, exposed_s=0.0)
    option = who.react(Situation(layout=running.without([first]), gap_s=1e9, seen_gap_s=1e9, costs=costs))
    assert (option.policy, option.way) == ("spare", "blocking")
    assert 1000.0 < option.stall_s <= 1800.0 * 1.01, "a stage takes half of the figure, the fullest all of that"


def test_only_moves_are_free_for_free():
    """Over a slow link a plan that sends much is as slow for it as for everybody."""
    cluster, job = files.load_cluster("cluster-2x16"), files.load_workload("workload-gpt-1.3b")
    table = table_of(cluster, job, 2)
    losses = [Trace(name="t", nodes=tuple(cluster.nodes), changes=(Change(at_s=100.0, lost=("n3",)),), end_s=2000.0)]
    report = compare(losses, table.seated(["free", "auto"], "fused"), Costs(move_s=1.0, exposed_s=0.0))
    assert report.ratio("free", "auto") >= 1 - 1e-6


def test_the_grid_that_is_played_on_is_the_fastest_with_messages_and_sums():
    cluster, job = files.load_cluster("cluster-2x16"), files.load_workload("workload-gpt-1.3b")
    picked = fastest_grid(cluster, job)
    steps = {}
    for num_stages in (1, 2, 4, 8):
        ground = ground_of(cluster, job, num_stages, "fused")
        grid = ground.grid(list(cluster.nodes))
        assert grid is not None
        steps[num_stages] = ground.step_s(grid)
    ground = ground_of(cluster, job, picked, "fused")
    best = ground.grid(list(cluster.nodes))
    assert best is not None and ground.step_s(best) <= min(steps.values())
    assert steps[1] > 2 * min(steps.values()), "whole copies sum everything over the slow link"


def test_a_trace_that_leaves_nobody_ends_in_waiting():
    assert [taken.way for taken in played("auto", Change(at_s=100.0, lost=SIX)).decisions] == ["wait"]


def test_newcomers_are_like_the_last_node():
    ground = GROUNDS["split"]
    found = ground.cluster_of(["n0", "n77"])
    assert replace(found.nodes[NodeId("n77")], node_id=NodeId("n0")) == found.nodes[NodeId("n0")]


@pytest.mark.parametrize("family", ["split", "staggered"])
def test_the_planner_finds_layouts_as_fast_as_the_exact_search_by_forms(family: Family):
    """For every number of nodes; two independent searches, the planner's simulates schedules, the other knows forms alone."""
    ground, times = equal_ground(family, COSTS), Times(equal_layers(), family)
    for count in range(22, 33):
        plan, best = ground.fastest([f"n{number}" for number in range(count)]), times.best(count)
        assert plan is not None and best is not None
        assert ground.step_s(plan) == pytest.approx(best.step_s)
