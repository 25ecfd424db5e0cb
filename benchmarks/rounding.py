"""What rounding alone does to the losses: the example's job under random plans without failures, against one process.

    python benchmarks/rounding.py [--plans 10] [--steps 60] [--seed 0] [--json]

A plan decides in which order gradients are added, and nothing else of the mathematics; so the difference of a step's loss from
that of one process is rounding, grown by training. Disturbed runs are held to a bound that must leave room for it. Nodes are
threads of this process over in-process links: the same engine and the same sums as with processes.
"""

import argparse
import itertools
import json
import random
import runpy
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch

from everstep.engine.executor import Executor
from everstep.engine.links import LocalPost, Mailbox
from everstep.plan import Hop, Plan, problems
from everstep.planner.step.schedules import order_of
from everstep.protocol.commit import mean_loss
from everstep.quantities import NodeId
from everstep.records import Committed, Counted
from everstep.runtime.job import CONTEXT, Declaration
from everstep.view import Member, View

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_gpt.py"
Numerics = Literal["fp32", "fp64-sum"]
NUMERICS: tuple[Numerics, ...] = ("fp32", "fp64-sum")


class _DeclaredError(Exception):
    """Ends the script as soon as it has said what it would train."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration


def declaration_of(script: Path, steps: int) -> Declaration:
    """The job that ``script`` declares for ``steps`` steps; it does not train."""

    def opened(declaration: Declaration) -> NoReturn:
        raise _DeclaredError(declaration)

    CONTEXT.open, before = opened, sys.argv
    sys.argv = [str(script), "--steps", str(steps)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _DeclaredError as found:
        return found.declaration
    finally:
        CONTEXT.open, sys.argv = None, before
    raise SystemExit(f"{script} declares no job")


def random_plan(chance: random.Random, num_layers: int, num_micro_batches: int) -> Plan:
    """Two to six nodes in two pipelines or more, cut at random; a micro-batch changes between them wherever it can."""
    nodes = [NodeId(f"n{rank}") for rank in range(chance.randint(2, 6))]
    # One pipeline alone adds in the order of one process, to the bit; so there are two or more, most of them with stages.
    bounds = [0, *sorted(chance.sample(range(1, len(nodes)), chance.randint(1, max(1, len(nodes) // 3)))), len(nodes)]
    ranges: dict[NodeId, range] = {}
    for begin, stop in itertools.pairwise(bounds):
        cuts = [0, *sorted(chance.sample(range(1, num_layers), stop - begin - 1)), num_layers]
        for node, (first, end) in zip(nodes[begin:stop], itertools.pairwise(cuts), strict=True):
            ranges[node] = range(first, end)
    routes = []
    for _ in range(num_micro_batches):
        route: list[Hop] = []
        at = 0
        while at < num_layers:
            node = chance.choice([node for node in nodes if at in ranges[node]])
            route.append(Hop(node, at, ranges[node].stop))
            at = ranges[node].stop
        routes.append(tuple(route))
    return Plan(
        num_layers=num_layers, placement={node: tuple(ranges[node]) for node in nodes}, routes=tuple(routes),
    )


class _Unwatched:
    def write(self, record: Counted | Committed) -> None:
        pass

    def reached(self, phase: str, step: int) -> None:
        pass


def losses(declaration: Declaration, plan: Plan, steps: int) -> list[float]:
    """Of each step under ``plan``, from the first weights on."""
    view = View(1, tuple(map(Member, plan.nodes)))
    wrong = problems(plan, view, len(declaration.facts.layers))
    assert not wrong, wrong
    mailboxes = {node: Mailbox() for node in plan.nodes}
    orders = order_of(plan)
    declaration.samples.micro_batches(0)  # the order of the epoch is made here once, not by all threads at a time
    found: dict[NodeId, list[float]] = {}
    failed: list[BaseException] = []

    def work(node: NodeId) -> None:
        try:
            executor = Executor(
                node=node, spec=declaration.spec(), held=states[node], mailbox=mailboxes[node], post=LocalPost(mailboxes),
                ledger=_Unwatched(), instants=_Unwatched(),
            )
            executor.follow(plan, orders[node], view)
            found[node] = [mean_loss(executor.run(step, 0)) for step in range(steps)]
        except BaseException as error:
            failed.append(error)
            for mailbox in mailboxes.values():
                mailbox.adopt(2)

    states = {node: declaration.held() for node in plan.nodes}
    for node, held in states.items():  # before any thread runs: first weights are drawn from a generator that all share
        held.hold(plan.placement[node])
    for mailbox in mailboxes.values():
        mailbox.adopt(1)
    threads = [threading.Thread(target=work, args=(node,)) for node in plan.nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found[plan.nodes[0]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan; the largest difference of a step's loss from one process, by numerics, and where it is."""

    plan: str
    largest: dict[str, float]
    at_step: dict[str, int]


def compare(declaration: Declaration, plans: Sequence[Plan], steps: int) -> list[Row]:
    """Each plan against one process with the same numerics."""
    largest: list[dict[str, float]] = [{} for _ in plans]
    at_step: list[dict[str, int]] = [{} for _ in plans]
    num_layers, node = len(declaration.facts.layers), NodeId("n0")
    alone = Plan(
        num_layers=num_layers, placement={node: tuple(range(num_layers))},
        routes=((Hop(node, 0, num_layers),),) * declaration.samples.num_micro_batches,
    )
    for numerics in NUMERICS:
        engine = replace(declaration.config.engine, numerics=numerics)
        job = replace(declaration, config=replace(declaration.config, engine=engine))
        wanted = losses(job, alone, steps)
        for index, plan in enumerate(plans):
            gaps = [abs(a - b) for a, b in zip(losses(job, plan, steps), wanted, strict=True)]
            largest[index][numerics] = max(gaps)
            at_step[index][numerics] = gaps.index(max(gaps))
            print(f"plan {index}, {numerics}: {max(gaps):.1e}", file=sys.stderr, flush=True)
    return [Row(plan=str(plan), largest=largest[i], at_step=at_step[i]) for i, plan in enumerate(plans)]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| plan | " + " | ".join(f"{n}: largest difference | at step" for n in NUMERICS) + " |"]
    lines.append("|---|" + "---|---|" * len(NUMERICS))
    for row in rows:
        cells = [f"{row.largest[n]:.1e} | {row.at_step[n]}" for n in NUMERICS]
        lines.append("| " + row.plan.replace("\n", "<br>") + " | " + " | ".join(cells) + " |")
    worst = [f"**{max(row.largest[n] for row in rows):.1e}** | " for n in NUMERICS]
    return "\n".join([*lines, f"| all | {' | '.join(worst)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the plans")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    declaration = declaration_of(EXAMPLE, options.steps)
    chance = random.Random(options.seed)
    plans = [
        random_plan(chance, len(declaration.facts.layers), declaration.samples.num_micro_batches) for _ in range(options.plans)
    ]
    rows = compare(declaration, plans, options.steps)
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
