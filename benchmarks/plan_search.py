"""How long the planner thinks: ``python benchmarks/plan_search.py [--write]``.

A plan runs on a shipped cluster, with the order that ``everstep plan`` takes or with split backward; then a node is lost, and
the whole decision is timed: every recovery proposed and priced, the table, the choice. Once the same node each time, after a
first time that does not count, which is what ``everstep plan`` prints as ``search_s``; and once another node each time, so
that only what does not depend on who is lost is warm: tables of layer splits, the front, prices of plain pipelines. Building
a table of splits is timed apart, with the cells of it that were not proved. The decision from memory is timed for every node
of the smallest cluster. Prints milliseconds of wall time and of processor time (medians), and the load of the machine beside
them. ``--write`` keeps the table in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from everstep.catalog.files import load_cluster, load_workload
from everstep.config import PlannerConfig, RunConfig
from everstep.controller import ClusterFacts, Controller
from everstep.planner.layouts.splits import Splits
from everstep.planner.whatif import running, what_if
from everstep.protocol.resolution import Resolution
from everstep.quantities import NodeId
from everstep.view import Member, View

CASES = (("cluster-32", "workload-gpt-6.7b", 20), ("cluster-1024", "workload-llama-7b", 20),
         ("cluster-16384", "workload-llama-70b", 5))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of wall time and of processor time."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall_s) * 1e3, (time.process_time() - cpu_s) * 1e3


def row(what: str, times: list[tuple[float, float]]) -> str:
    walls, cpus = zip(*times, strict=True)
    return f"| {what} | {statistics.median(walls):.2f} | {min(walls):.2f} | {statistics.median(cpus):.2f} |"


def search_rows() -> list[str]:
    rows = []
    for cluster_name, workload_name, repeats in CASES:
        cluster, workload = load_cluster(cluster_name), load_workload(workload_name)
        config = PlannerConfig()
        cap = min(node.memory_bytes or 0 for node in cluster.nodes.values())
        columns = min(64, workload.num_micro_batches)

        def build(workload=workload, cap=cap, columns=columns):  # type: ignore[no-untyped-def]
            return Splits(workload, cap, columns=columns, longest=16)

        words = f"{workload_name}: table of exact splits, 16 stages, {columns} micro-batches, {build().open} cells not proved"
        rows.append(row(words, [timed(build)]))
        for split in ("auto", "on"):
            start = running(cluster, workload, config, split=split)  # type: ignore[arg-type]
            victims = list(cluster.nodes)[:repeats + 1]

            def lose(node: NodeId, cluster=cluster, workload=workload, config=config, start=start):  # type: ignore[no-untyped-def]
                return what_if(cluster, workload, config, lose=(node,), start=start)

            lose(victims[0])
            how = f"{'split' if start.plan.order.split else 'fused'} backward{' (set)' if split == 'on' else ''}"
            words = f"{len(cluster.nodes) - 1} of {len(cluster.nodes)}, {workload_name}, {how}"
            rows.append(row(f"{words}: the same loss again", [timed(partial(lose, victims[0])) for _ in victims[1:]]))
            rows.append(row(f"{words}: another loss each time", [timed(partial(lose, node)) for node in victims[1:]]))
    return rows


def memory_row() -> str:
    cluster, workload = load_cluster("cluster-32"), load_workload("workload-gpt-6.7b")
    times = []
    for lost in cluster.nodes:
        controller = Controller(
            RunConfig(planner=PlannerConfig(worker_memory_bytes=61_000_000_000)), ClusterFacts(link=cluster.link),
        )
        controller.start(View(1, tuple(Member(node) for node in cluster.nodes)), workload, None)
        while controller.think():
            pass
        assert controller.plan is not None
        view = View(2, tuple(Member(node) for node in cluster.nodes if node != lost))
        holds = {node: workload.units_of(frozenset(controller.plan.placement[node])) for node in view.nodes}
        situation = controller._situation(view, Resolution(40, 0, None, holds), (lost,), (), 60.0, None)
        times.append(timed(partial(controller._remembered, situation)))
    return row("31 of 32 from memory: candidates of the lost node's case, renamed and scored", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        "| what | wall ms, median | wall ms, least | processor ms, median |", "|---|---|---|---|",
        *search_rows(), memory_row(),
    ]
    text = "\n".join(lines)
    words = f"{os.cpu_count()} cores, load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
    print(f"{text}\n\n{words}")
    if options.write:
        folder = Path(__file__).parent / "results"
        head = f"# Time of a decision\n\n`python benchmarks/plan_search.py --write`, {words}.\n\n"
        (folder / "plan_search.md").write_text(f"{head}{text}\n")


if __name__ == "__main__":
    main()
