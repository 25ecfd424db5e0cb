"""The script that ``steady_state.py`` runs: the example's model, trained by Everstep and by plain torch in turn.

Every process holds both trainings and takes a round of steps of one, then of the other, so that whatever else the machine
does meets both. A round is timed between two barriers. Both start from the same weights and read the same samples in the same
micro-batches; that their losses stay together shows that they did the same work.
"""

import argparse
import gc
import json
import runpy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.catalog import texts
from everstep.config import CheckpointConfig, EngineConfig, PlannerConfig, RunConfig
from everstep.engine.model import build_layers, facts_of
from everstep.plan import Plan

CLIP_NORM = 1.0
SEED = 7
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_gpt.py"


def model_of(options: argparse.Namespace) -> SimpleNamespace:
    """The example's layers, loss and data at the wanted size."""
    names = runpy.run_path(str(EXAMPLE), run_name="tiny_gpt")
    # Its functions look their sizes up when they are called.
    names["layers"].__globals__.update(T=options.context, D=options.width, BLOCKS=options.blocks)
    return SimpleNamespace(**names)


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


class Plain:
    """What the three ways of plain torch share: the same first weights, samples and micro-batches."""

    def __init__(self, example: SimpleNamespace, data: everstep.Indexed) -> None:
        self.loss_of, self.data = example.loss, data
        self.layers = OrderedDict(
            (name.replace(".", "_"), module) for _, name, module in build_layers(example.layers, SEED, lambda _: True)
        )

    def read(self, ids: list[int]) -> Any:
        return self.data.collate([self.data.dataset[index] for index in ids])


class OneProcess(Plain):
    """Gradient accumulation over micro-batches."""

    def __init__(self, example: SimpleNamespace, data: everstep.Indexed) -> None:
        super().__init__(example, data)
        self.model = nn.Sequential(self.layers)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(self.parameters)

    def step(self, number: int) -> float:
        micro_batches = self.data.micro_batches(number)
        total = torch.zeros(())
        for ids in micro_batches:
            item = self.read(ids)
            loss = self.loss_of(self.model(item), item) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


class Replicas(Plain):
    """DistributedDataParallel over gloo; gradients are exchanged with the last micro-batch of a step."""

    def __init__(self, example: SimpleNamespace, data: everstep.Indexed) -> None:
        super().__init__(example, data)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(nn.Sequential(self.layers))
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(self.parameters)

    def step(self, number: int) -> float:
        mine = self.data.micro_batches(number)[self.rank :: self.size]
        total = torch.zeros(())
        with self.model.no_sync():
            for ids in mine[:-1]:
                total += self._accumulate(ids, len(mine))
        total += self._accumulate(mine[-1], len(mine))
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def _accumulate(self, ids: list[int], num_mine: int) -> torch.Tensor:
        item = self.read(ids)
        loss = self.loss_of(self.model(item), item) / num_mine
        loss.backward()
        return loss.detach()


class Pipeline(Plain):
    """1F1B of torch.distributed.pipelining over gloo, cut where ``plan`` cuts. The norm is summed over the stages."""

    def __init__(self, example: SimpleNamespace, data: everstep.Indexed, plan: Plan) -> None:
        super().__init__(example, data)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        hop = plan.routes[0][self.rank]
        self.model = nn.Sequential(OrderedDict(list(self.layers.items())[hop.first : hop.end]))
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(self.parameters)
        stage = PipelineStage(self.model, self.rank, self.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, data.num_micro_batches, loss_fn=self.loss_of)

    def step(self, number: int) -> float:
        ids = [index for micro_batch in self.data.micro_batches(number) for index in micro_batch]
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(self.read(ids))
        elif self.rank == self.size - 1:
            self.schedule.step(target=self.read(ids), losses=losses)
        else:
            self.schedule.step()
        square = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP_NORM, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0


def plain_of(case: str, example: SimpleNamespace, data: everstep.Indexed, plan: Plan) -> Plain:
    if case == "one-process":
        return OneProcess(example, data)
    return Replicas(example, data) if case == "replicas" else Pipeline(example, data, plan)


def check_plan(case: str, workers: int, plan: Plan) -> None:
    """Raises RuntimeError when the planner chose something else than what torch is compared in."""
    lengths = {len(route) for route in plan.routes}
    wanted = workers if case == "pipeline" else 1
    if lengths != {wanted} or plan.spares or (case == "pipeline" and len(plan.pipelines()) != 1):
        raise RuntimeError(f"wanted {workers} workers as {case}, the plan is\n{plan}")


def timed(act: Callable[[], float], barrier: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds by the wall and of this process, and what ``act`` gave. No garbage is left to the other side."""
    gc.collect()
    barrier()
    began_s, began_processor_s = time.perf_counter(), time.process_time()
    value = act()
    spent_processor_s = time.process_time() - began_processor_s
    barrier()
    return time.perf_counter() - began_s, spent_processor_s, value


def config_of(options: argparse.Namespace, example: SimpleNamespace) -> RunConfig:
    """Only stages of a length that torch is compared in; no checkpoints, since torch writes none."""
    unit_bytes = sum(unit.parameter_bytes for unit in facts_of(example.layers, SEED).units.values())
    # Parameters, two moments and gradients; a quarter more than an even cut, and less than a shorter pipeline needs.
    cap_bytes = round(1.25 * 4 * unit_bytes / options.workers) if options.case == "pipeline" else None
    return RunConfig(
        planner=PlannerConfig(
            worker_memory_bytes=cap_bytes, max_stages=options.workers if options.case == "pipeline" else 1,
        ),
        checkpoint=CheckpointConfig(every_steps=0), engine=EngineConfig(split_backward=options.split),
    )


def join(workers: int, store_path: str) -> tuple[int, Callable[[], None]]:
    """This process's rank among plain torch's, in order of arrival, and a barrier."""
    if workers == 1:
        return 0, lambda: None
    store = dist.FileStore(store_path, workers)
    rank = store.add("arrived", 1) - 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    return rank, dist.barrier


def sum_over_all(value: float) -> float:
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["one-process", "replicas", "pipeline"])
    parser.add_argument("result", help="where the numbers go, as JSON")
    for name, value in (
        ("workers", 1), ("pairs", 40), ("round", 1), ("width", 128), ("blocks", 8), ("context", 64), ("batch", 32),
        ("micro", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--split", choices=["auto", "on", "off"], default="auto", help="split_backward of Everstep's side")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    example = model_of(options)
    data = everstep.Indexed(
        example.Windows(texts.path("kjv").read_bytes()), batch=options.batch, micro=options.micro, seed=SEED
    )
    job = everstep.Job(
        layers=example.layers, loss=example.loss, optimizer=optimizer, clip_norm=CLIP_NORM, data=data,
        config=config_of(options, example),
    )
    steps = (options.pairs + 1) * options.round  # the first pair warms up
    turns = job.steps(until=steps)
    first = next(turns)
    assert job.layout is not None, "a plan comes before the first step"
    check_plan(options.case, options.workers, job.layout)
    rank, barrier = join(options.workers, f"{options.result}.store")
    plain = plain_of(options.case, example, data, job.layout)
    ours = _rounds(first, turns, options.round)
    theirs = (plain.step(number) for number in range(steps))
    sides = {
        "everstep": lambda: next(ours),
        "torch": lambda: [next(theirs) for _ in range(options.round)][-1],
    }
    rows = []
    for pair in range(options.pairs + 1):
        row: dict[str, Any] = {}
        for name in sorted(sides, reverse=pair % 2 == 1):
            wall_s, processor_s, loss = timed(sides[name], barrier)
            row[name] = {
                "wall_s": wall_s / options.round, "processor_s": sum_over_all(processor_s) / options.round, "loss": loss
            }
        # A process of torch's knows only its own part of the loss.
        row["torch"]["loss"] = sum_over_all(row["torch"]["loss"]) / (options.workers if options.case == "replicas" else 1)
        rows.append(row)
    if rank == 0:
        Path(options.result).write_text(json.dumps({"plan": str(job.layout), "rows": rows[1:]}))
    for _ in turns:
        raise AssertionError("all steps are done")
    if dist.is_initialized():
        dist.destroy_process_group()


def _rounds(first: Any, turns: Iterator[Any], length: int) -> Iterator[float]:
    """The loss of the last step of each round."""
    step = first
    while True:
        for index in range(length):
            result = step.run()
            if index < length - 1:
                step = next(turns)
        yield result.loss
        step = next(turns)


if __name__ == "__main__":
    main()
