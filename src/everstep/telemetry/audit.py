"""The account of a run, added up from outside: the nodes' own files against what the job says a step is.

For the committed try of every step: each use of each unit counts each micro-batch exactly once, over all nodes; the
micro-batches are read as the same samples by everybody; an epoch has no sample twice. Tries that were not
committed, reading again for a redo, and first and last stage reading the same sample, are no repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep import records
from everstep.quantities import NodeId, node_number
from everstep.telemetry.line import Line, Try, surviving
from everstep.telemetry.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The sums, and everything that is wrong with them; without problems the account is right."""

    steps: int
    """Committed, on the line that survives."""
    samples_seen: int
    """Samples that count in these steps, with their repetitions."""
    samples_lost: int
    """Samples that these steps should have trained on and did not."""
    samples_repeated: int
    """Times that a sample counts beyond its first in an epoch."""
    problems: tuple[str, ...]


def audit(run: Run, line: Line | None = None) -> Audit:
    """Add up ``run``; ``line`` is its surviving line, if it is known already."""
    line = surviving(run) if line is None else line
    problems = [*line.problems, *_gap_problems(run, line)]
    counted = _counted(run)
    epochs: dict[int, Counter[int]] = {}
    for step, attempt in line.tries.items():
        accounts = counted.get((attempt.view, step, attempt.attempt), [])
        expected = micro_batch_sizes(run.started, step)
        times, found = _times_counted(run.started, attempt, accounts, len(expected))
        samples, more = _samples_read(attempt, accounts, expected)
        problems += [*found, *more]
        seen = epochs.setdefault(step // _steps_per_epoch(run.started), Counter())
        for micro_batch, ids in samples.items():
            for sample in ids:
                seen[sample] += times[micro_batch]
    problems += _epoch_problems(run.started, epochs)
    total = sum(sum(micro_batch_sizes(run.started, step)) for step in _steps_expected(run, line))
    different = [sample for seen in epochs.values() for sample, times_seen in seen.items() if times_seen]
    known = [sample for sample in different if 0 <= sample < run.started.dataset_samples]
    samples_seen = sum(seen.total() for seen in epochs.values())
    return Audit(
        steps=len(line.tries), samples_seen=samples_seen, samples_lost=total - len(known),
        samples_repeated=samples_seen - len(different), problems=tuple(problems),
    )


def _steps_per_epoch(started: records.RunStarted) -> int:
    return -(-started.dataset_samples // started.batch)


def micro_batch_sizes(started: records.RunStarted, step: int) -> list[int]:
    """Samples of each micro-batch of ``step``: the last step of an epoch takes what is left."""
    in_epoch = step % _steps_per_epoch(started)
    samples = min(started.batch, started.dataset_samples - in_epoch * started.batch)
    return [min(started.micro, samples - first) for first in range(0, samples, started.micro)]


def _steps_expected(run: Run, line: Line) -> range:
    return range(run.started.first_step, max(line.tries, default=run.started.first_step - 1) + 1)


def _gap_problems(run: Run, line: Line) -> list[str]:
    expected = _steps_expected(run, line)
    found = [f"step {step} was never committed" for step in expected if step not in line.tries]
    found += [f"step {step} was committed, but the run begins at {expected.start}"
              for step in line.tries if step not in expected]
    until = next(r.until for r in reversed(run.agent) if isinstance(r, records.RunStarted))
    if run.ended is not None and run.ended.outcome == "done" and until is not None and expected.stop < until:
        found.append(f"the run says it is done with {until} steps, but the last that was committed is {expected.stop - 1}")
    return found


def _counted(run: Run) -> dict[tuple[int, int, int], list[records.Counted]]:
    found: dict[tuple[int, int, int], list[records.Counted]] = {}
    for node in sorted(run.nodes, key=node_number):
        for record in run.nodes[node]:
            if isinstance(record, records.Counted):
                found.setdefault((record.view, record.step, record.attempt), []).append(record)
    return found


def _times_counted(
    started: records.RunStarted, attempt: Try, accounts: Sequence[records.Counted], num_micro_batches: int,
) -> tuple[list[int], list[str]]:
    """How often each micro-batch counts (0 if one use lacks it), and what is wrong about it."""
    uses = [f"{unit}/{layer}" for unit, layers in started.uses.items() for layer in layers]
    holders: dict[tuple[str, int], list[NodeId]] = {}
    for account in accounts:
        for use, micro_batches in account.pairs.items():
            for micro_batch in micro_batches:
                holders.setdefault((use, micro_batch), []).append(account.node)
    problems = [
        f"{attempt}: {use} counts micro-batch {micro_batch}, which is not part of the step ({', '.join(nodes)})"
        for (use, micro_batch), nodes in holders.items()
        if use not in uses or not 0 <= micro_batch < num_micro_batches
    ]
    times: list[int] = []
    for micro_batch in range(num_micro_batches):
        nodes_by_use = {use: holders.get((use, micro_batch), []) for use in uses}
        problems += _pair_problems(attempt, micro_batch, nodes_by_use)
        numbers = [len(nodes) for nodes in nodes_by_use.values()]
        times.append(0 if 0 in numbers else max(numbers, default=1))
    return times, problems


def _pair_problems(attempt: Try, micro_batch: int, nodes_by_use: Mapping[str, Sequence[NodeId]]) -> list[str]:
    never = [use for use, nodes in nodes_by_use.items() if not nodes]
    found = [f"{attempt}: micro-batch {micro_batch} is not counted by {_some(never)}"] if never else []
    return found + [
        f"{attempt}: {use} counts micro-batch {micro_batch} {len(nodes)} times ({', '.join(nodes)})"
        for use, nodes in nodes_by_use.items() if len(nodes) > 1
    ]


def _samples_read(
    attempt: Try, accounts: Sequence[records.Counted], expected: Sequence[int],
) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """The samples of each micro-batch as its first reader names them, and what is wrong about them."""
    problems: list[str] = []
    read: dict[int, tuple[NodeId, tuple[int, ...]]] = {}
    for account in accounts:
        for micro_batch, ids in account.samples.items():
            first, agreed = read.setdefault(micro_batch, (account.node, ids))
            if agreed != ids:
                problems.append(
                    f"{attempt}: micro-batch {micro_batch} is samples {_some(agreed)} on {first}, "
                    f"but {_some(ids)} on {account.node}"
                )
    samples = {micro_batch: ids for micro_batch, (_, ids) in read.items() if 0 <= micro_batch < len(expected)}
    for micro_batch, number in enumerate(expected):
        got = len(samples.get(micro_batch, ()))
        if got != number:
            problems.append(f"{attempt}: micro-batch {micro_batch} has {got} samples, expected {number}")
    return samples, problems


def _epoch_problems(started: records.RunStarted, epochs: Mapping[int, Counter[int]]) -> list[str]:
    found: list[str] = []
    for epoch, seen in epochs.items():
        found += [f"epoch {epoch}: sample {sample} counts {times} times"
                  for sample, times in sorted(seen.items()) if times > 1]
        found += [f"epoch {epoch}: sample {sample} is not in the data set of {started.dataset_samples}"
                  for sample in sorted(seen) if not 0 <= sample < started.dataset_samples]
    return found


def _some(values: Iterable[object], most: int = 6) -> str:
    words = [str(value) for value in values]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) or "none") + more
