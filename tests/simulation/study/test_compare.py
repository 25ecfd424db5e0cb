"""Comparing policies: who is best in hindsight, and what a cluster and a workload are at this level."""

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.catalog import files
from everstep.catalog.trace_files import load_trace
from everstep.errors import ConfigError, InfeasibleError
from everstep.simulator.study import picture
from everstep.simulator.study.compare import all_times, by_forms, compare, job_of, move_seconds, placed_anew, singles_of
from everstep.simulator.study.hazards import draw
from everstep.simulator.study.player import Costs
from everstep.simulator.study.rules import SINGLES, named
from everstep.simulator.study.times import equal_layers

TIMES = all_times(equal_layers())
LOSSES = [draw("exponential", num_nodes=32, num_losses=4, gap_s=60.0, seed=seed) for seed in range(3)]


def test_regret_is_against_the_best_single_policy_of_each_trace():
    report = compare(
        LOSSES, by_forms([named("auto")], TIMES), Costs(move_s=10.0), singles=by_forms(singles_of("staggered"), TIMES),
        num_nodes=32,
    )
    regrets = []
    for index in range(3):
        best = max(report.outcomes[name][index].samples for name in SINGLES)
        regrets.append(1 - report.outcomes["auto"][index].samples / best)
    assert report.rows["auto"].regret == pytest.approx(sum(regrets) / 3)
    assert report.rows["auto"].worst_regret == max(regrets)
    assert min(report.rows[name].worst_regret for name in SINGLES) >= 0


def test_decisions_are_counted_over_all_traces():
    report = compare(LOSSES, by_forms([named("repartition")], TIMES), Costs(move_s=10.0))
    assert report.rows["repartition"].decisions == {"repartition blocking": 12}


def test_other_first_places_are_the_same_trace_with_other_nodes_in_front():
    p3 = load_trace("p3")
    assert placed_anew(p3, 0) == p3
    other = placed_anew(p3, 1)
    assert other.nodes != p3.nodes
    assert sorted(other.nodes) == sorted(p3.nodes)
    assert other.changes == p3.changes


def test_the_grid_of_a_workload_is_the_fastest_that_fits_with_two_of_every_stage():
    cluster, workload = files.load_cluster("cluster-8"), files.load_workload("workload-tiny-gpt")
    job = job_of(cluster, workload)
    assert (job.batch, job.num_micro_batches, job.num_layers) == (32, 8, 8)
    assert 2 <= job.num_stages <= 4
    assert job_of(cluster, workload, num_stages=4).num_stages == 4


def test_a_grid_without_two_of_every_stage_or_beyond_memory_is_refused():
    cluster, workload = files.load_cluster("cluster-8"), files.load_workload("workload-tiny-gpt")
    with pytest.raises(InfeasibleError, match="want 1 to 4 stages"):
        job_of(cluster, workload, num_stages=5)
    small = replace(cluster, nodes={name: replace(node, memory_bytes=1000) for name, node in cluster.nodes.items()})
    with pytest.raises(InfeasibleError, match=r"1 stages: a stage needs .* of 1\.0 KB"):
        job_of(small, workload)


def test_a_move_takes_the_fullest_stage_over_one_link():
    cluster, workload = files.load_cluster("cluster-8"), files.load_workload("workload-tiny-gpt")
    one = job_of(cluster, workload, num_stages=4)
    bounds = TIMES["split"].grid_bounds()
    assert len(bounds) == 4
    fewer = move_seconds(job_of(cluster, workload, num_stages=2), cluster, workload)
    assert move_seconds(one, cluster, workload) < fewer


def test_a_picture_that_cannot_be_written_is_the_users_mistake(tmp_path: Path):
    report = compare(LOSSES, by_forms([named("reroute")], TIMES), Costs(move_s=10.0))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        picture.draw(report, LOSSES, tmp_path / "file" / "study.png")
