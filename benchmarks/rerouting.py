"""How near rerouting comes to a bound on layouts that are not even: ``python benchmarks/rerouting.py [--write]``.

Random layouts of 31 nodes over 32 equal layers, pipelines of 4 to 8 stages cut unevenly, F = B = W, no messages, split
backward; one to three nodes are lost. No node may use more memory afterwards than the fullest did before, with four slots more
than 1F1B counted for all alike. Everything is given as a share above the bound of ``level.least_seconds``, which no schedule
beats whatever the routes: the work of the busiest node (with its head), and the step with its schedule. *Filled*: only gaps are
filled, each micro-batch over whoever has least to do. *Passed on*: work is then passed on, as a decision does it. *Searched*:
``improve`` in idle time. Every schedule is checked, and its memory counted along it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from everstep import schedule as schedules
from everstep.cluster import Cluster, Link, Node
from everstep.plan import Hop, Order, Plan, Route
from everstep.planner.idle.improve import improve
from everstep.planner.layouts.search import with_room
from everstep.planner.routes.level import Levelled, least_seconds
from everstep.planner.routes.router import PASSED_ON, Router
from everstep.planner.step.cost import step_seconds
from everstep.planner.step.memory import node_bytes
from everstep.planner.step.schedules import order_of
from everstep.quantities import NodeId, UnitName
from everstep.schedule import Schedule
from everstep.workload import LayerCost, Unit, Workload

NODES, LAYERS, STATE, ACTIVATION = 31, 32, 20_000, 1_000
SHORTEST, LONGEST = 4, 8
SEEDS, ROUNDS = 16, 60


@dataclass(frozen=True, slots=True)
class Loss:
    """A layout, who is left, and how much each may use."""

    plan: Plan
    workload: Workload
    windows: Mapping[NodeId, frozenset[int]]
    cluster: Cluster
    cap: int


def workload_of(num_micro_batches: int) -> Workload:
    layers = tuple(
        LayerCost(name=f"l{k}", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, activation_bytes=ACTIVATION)
        for k in range(LAYERS)
    )
    units = {
        UnitName(f"l{k}"): Unit(name=UnitName(f"l{k}"), layers=(k,), parameter_bytes=0, state_bytes=STATE)
        for k in range(LAYERS)
    }
    return Workload(layers=layers, units=units, num_micro_batches=num_micro_batches)


def pipelines_of(chance: random.Random) -> list[Route]:
    """Lengths that use all nodes, and stages as even as layers allow, the larger ones anywhere."""
    lengths: list[int] = []
    while sum(lengths) != NODES:
        left = NODES - sum(lengths)
        lengths = [*lengths, chance.randint(SHORTEST, min(LONGEST, left))] if left >= SHORTEST else []
    found, number = [], 0
    for length in lengths:
        size, larger = divmod(LAYERS, length)
        sizes = [size + 1] * larger + [size] * (length - larger)
        chance.shuffle(sizes)
        found.append(tuple(
            Hop(NodeId(f"n{number + index}"), end - sizes[index], end) for index, end in enumerate(accumulate(sizes))
        ))
        number += length
    return found


def loss_of(seed: int, num_micro_batches: int) -> Loss:
    """The same seed gives the same layout and the same loss."""
    chance = random.Random(seed)
    pipelines = pipelines_of(chance)
    slowest = [max(len(hop.layers) for hop in route) for route in pipelines]
    shares = [0] * len(pipelines)
    routes = []
    for _ in range(num_micro_batches):  # whoever would end first with one more takes it
        index = min(range(len(pipelines)), key=lambda k: (shares[k] + 1) * slowest[k])
        shares[index] += 1
        routes.append(pipelines[index])
    placement = {hop.node: tuple(hop.layers) for route in pipelines for hop in route}
    plan = Plan(num_layers=LAYERS, placement=placement, routes=tuple(routes), order=Order(split=True, extra_slots=4))
    workload = workload_of(num_micro_batches)
    cap = max(node_bytes(plan, workload).values())
    lost: frozenset[NodeId] = frozenset()
    num_lost = chance.randint(1, 3)
    while not lost or plan.lost_layers(lost):
        lost = frozenset(chance.sample(sorted(placement), num_lost))
    left = {node: frozenset(layers) for node, layers in placement.items() if node not in lost}
    cluster = Cluster(
        nodes={node: Node(node_id=node, memory_bytes=cap) for node in left}, link=Link(alpha_s=0.0, bytes_per_s=1e30),
    )
    return Loss(plan, workload, left, cluster, cap)


def step_of(loss: Loss, plan: Plan, schedule: Schedule | None = None) -> float:
    """Checked.

    Raises:
        AssertionError: the schedule may not run, or does not fit.
    """
    schedule = order_of(plan) if schedule is None else schedule
    wrong = schedules.problems(schedule, plan)
    assert not wrong, wrong
    assert max(node_bytes(plan, loss.workload, schedule).values()) <= loss.cap, "more memory than before"
    return step_seconds(plan, loss.workload, loss.cluster, schedule)


def shares_of(seed: int, num_micro_batches: int) -> dict[str, float]:
    """By column: how far above the bound, as a share; and milliseconds of processor time."""
    loss = loss_of(seed, num_micro_batches)
    speeds = dict.fromkeys(loss.windows, 1.0)
    least_s = least_seconds(loss.windows, loss.workload, speeds)
    found: dict[str, float] = {}
    placement = {node: tuple(sorted(layers)) for node, layers in loss.windows.items()}
    plan = loss.plan
    for words, times in (("filled", 0), ("passed on", PASSED_ON)):
        begun_s = time.process_time()
        routes = Router(loss.windows, loss.workload, speeds).routes(loss.plan.routes, passed_on=times)
        found[f"ms, {words}"] = (time.process_time() - begun_s) * 1e3
        assert routes is not None, "a grid of whole pipelines is left"
        found[f"work, {words}"] = Levelled(routes, loss.windows, loss.workload, speeds).over
        plan = with_room(replace(loss.plan, routes=routes, placement=placement), loss.workload, loss.cluster)
        found[f"step, {words}"] = step_of(loss, plan) / least_s - 1
    better = improve(plan, loss.workload, rounds=ROUNDS, cluster=loss.cluster, caps=dict.fromkeys(loss.windows, loss.cap))
    found["step, searched"] = step_of(loss, better.plan, better.schedule) / least_s - 1
    return found


COLUMNS = ("work, filled", "work, passed on", "step, filled", "step, passed on", "step, searched")


def rows_of(num_micro_batches: int) -> list[str]:
    found = [shares_of(seed, num_micro_batches) for seed in range(SEEDS)]
    rows = []
    for words, of in (("mean", statistics.mean), ("worst", max)):
        shares = " | ".join(f"{of([shares[column] for shares in found]) * 100:.1f} %" for column in COLUMNS)
        millis = " | ".join(
            f"{statistics.median([shares[f'ms, {which}'] for shares in found]):.1f}" for which in ("filled", "passed on")
        )
        rows.append(f"| {num_micro_batches} | {words} | {shares} | {millis} |")
    return rows


HEAD = """# Rerouting on layouts that are not even

`python benchmarks/rerouting.py --write`; 31 nodes, 32 layers, pipelines of 4 to 8 stages, one to three nodes lost, {seeds}
layouts. Shares above the bound that no schedule beats; *work* is the busiest node's, *step* is with its schedule. Milliseconds
are medians of processor time for all routes of a decision ({load}).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        f"| micro-batches | layouts | {' | '.join(COLUMNS)} | ms, filled | ms, passed on |", "|---" * (4 + len(COLUMNS)) + "|",
        *rows_of(64), *rows_of(256),
    ]
    print("\n".join(lines))
    if options.write:
        folder = Path(__file__).parent / "results"
        words = f"{os.cpu_count()} cores, load {load:.1f}"
        (folder / "rerouting.md").write_text(f"{HEAD.format(seeds=SEEDS, load=words)}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
