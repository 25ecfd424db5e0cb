"""A run on disk that a test tells record by record: three layers, four nodes, ten samples, batches of four.

The whole story: two pipelines of two nodes train six steps; n3 is killed in step 3, its micro-batches are rerouted
over n1, and step 3 is redone whole. An epoch is three steps of 4, 4 and 2 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep import records
from everstep.decision import Candidate, Decision
from everstep.plan import Hop, Plan
from everstep.quantities import NodeId
from everstep.view import Member, View

USES = {"embed.weight": ("embed", "head"), "block": ("block",), "head.bias": ("head",)}
N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))
HOLDS = {N0: (0,), N1: (1, 2), N2: (0,), N3: (1, 2)}
LAYERS = ("embed", "block", "head")


def plan(*nodes: NodeId, pipelines: tuple[tuple[NodeId, NodeId], ...]) -> Plan:
    """Micro-batch m takes pipeline m."""
    routes = tuple((Hop(first, 0, 1), Hop(last, 1, 3)) for first, last in pipelines)
    return Plan(num_layers=3, placement={node: HOLDS[node] for node in nodes}, routes=routes)


WHOLE = plan(N0, N1, N2, N3, pipelines=((N0, N1), (N2, N3)))
REROUTED = plan(N0, N1, N2, pipelines=((N0, N1), (N2, N1)))


def decision(cause: str, view: int, step: int, chosen: Plan, policy: str) -> Decision:
    """Two candidates that can be taken and one that cannot."""
    return Decision(
        cause=cause, view=view, step=step, gap_s=600.0, chosen=0, decide_s=0.004,
        candidates=(
            Candidate(policy=policy, plan=chosen, step_s=0.3, stall_s=0.1, peak_bytes=9_000_000, value=7_900),
            Candidate(policy="shrink", plan=chosen, step_s=0.4, stall_s=0.1, peak_bytes=9_000_000, value=5_900,
                      reason="fewer samples"),
            Candidate(policy="spare", plan=None, reason="no spare is left"),
        ),
    )


def view(number: int, *nodes: NodeId) -> View:
    return View(number, tuple(Member(node, place=int(node[1:])) for node in nodes))


@dataclass
class Story:
    """Records to be written; a test changes them first."""

    agent: list[records.Record] = field(default_factory=list)
    nodes: dict[NodeId, list[records.Record]] = field(default_factory=dict)
    now_s: float = 0.0

    def start(self, *, first_step: int = 0, until: int | None = 6) -> None:
        self.agent.append(records.RunStarted(
            time_s=0.0, script="train.py", arguments=(), workers=4, spares=0, seed=7, numerics="fp32", until=until,
            dataset_samples=10, batch=4, micro=2, layers=LAYERS, uses=USES, first_step=first_step,
        ))
        self.now_s = 0.0

    def adopt(self, number: int, plan: Plan, step: int, policy: str, cause: str, attempt: int = 0) -> None:
        """A new view and its plan."""
        self.agent.append(records.ViewCommitted(time_s=self.now_s, view=view(number, *plan.nodes), cause=cause))
        self.agent.append(records.PlanCommitted(
            time_s=self.now_s, view=number, step=step, attempt=attempt, policy=policy, plan=plan,
            decision=decision(cause, number, step, plan, policy),
        ))

    def count(self, plan: Plan, number: int, step: int, attempt: int = 0) -> None:
        """Every node of ``plan`` writes its account of one attempt."""
        for node in plan.nodes:
            mine = [m for m in range(micro_batches(step)) if any(hop.node == node for hop in plan.routes[m])]
            layers = {LAYERS[layer] for layer in plan.placement[node]}
            self.write_as(node, records.Counted(
                node=node, view=number, step=step, attempt=attempt,
                pairs={f"{unit}/{layer}": tuple(mine) for unit, users in USES.items() for layer in users
                       if layer in layers and mine},
                samples={m: samples(step, m) for m in mine},
            ))

    def commit(self, plan: Plan, number: int, step: int, attempt: int = 0, loss: float | None = None) -> None:
        """A whole step: accounts, the union on every node, and the agent hears of it."""
        loss = 5.0 - step / 10 if loss is None else loss
        self.count(plan, number, step, attempt)
        for node in plan.nodes:
            self.write_as(node, records.Committed(node=node, view=number, step=step, attempt=attempt, loss=loss))
        self.now_s += 0.25
        self.agent.append(records.StepSeen(time_s=self.now_s, step=step, attempt=attempt, loss=loss, step_s=0.25))

    def end(self, outcome: str = "done", steps: int = 6) -> None:
        self.agent.append(records.RunEnded(
            time_s=self.now_s, outcome=outcome, steps=steps, state_hash={"block": {"n1": "ab12"}},
        ))

    def write_as(self, node: NodeId, record: records.Record) -> None:
        self.nodes.setdefault(node, []).append(record)

    def change(self, node: NodeId, step: int, **fields: object) -> None:
        """Replace fields of the last account that ``node`` wrote for ``step``."""
        mine = self.nodes[node]
        index = max(i for i, r in enumerate(mine) if isinstance(r, records.Counted) and r.step == step)
        mine[index] = msgspec.structs.replace(mine[index], **fields)

    def write(self, directory: Path) -> Path:
        """Put the story on disk as a run would."""
        (directory / "nodes").mkdir(parents=True)
        (directory / "agent.jsonl").write_bytes(b"".join(map(records.line, self.agent)))
        for node, lines in self.nodes.items():
            (directory / "nodes" / f"{node}.jsonl").write_bytes(b"".join(map(records.line, lines)))
        return directory


def micro_batches(step: int) -> int:
    return 1 if step % 3 == 2 else 2


def samples(step: int, micro_batch: int) -> tuple[int, ...]:
    """Backwards through the data set in odd epochs: an order of its own, each sample once."""
    first = step % 3 * 4 + micro_batch * 2
    ids = (first, first + 1)
    return ids if step // 3 % 2 == 0 else tuple(9 - sample for sample in ids)


def whole_story() -> Story:
    """Six steps; n3 is killed in step 3, which is redone whole on a rerouted plan."""
    story = Story()
    story.start()
    story.adopt(1, WHOLE, 0, "start", "start")
    for step in range(3):
        story.commit(WHOLE, 1, step)
    story.count(WHOLE, 1, 3)
    story.now_s += 0.2
    story.adopt(2, REROUTED, 3, "reroute", "n3 lost", attempt=1)
    story.commit(REROUTED, 2, 3, attempt=1)
    story.agent.append(records.EventSeen(
        time_s=story.now_s, step=3, phase="backward", node="n3", policy="reroute", decision="reroute: 0.30 s a step",
        detect_s=0.012, decide_s=0.004, stall_s=0.21, step_s_before=0.25, step_s_after=0.31, step_s_predicted=0.3,
    ))
    for step in (4, 5):
        story.commit(REROUTED, 2, step)
    story.agent.append(records.CheckpointWritten(time_s=story.now_s, step=6, view=2, path="checkpoints/6"))
    story.end()
    return story
