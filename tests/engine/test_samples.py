"""Which samples a step trains on depends on the step alone: once an epoch each, whoever reads them and however often."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.engine.samples import Samples, count_of, inputs_of
from everstep.errors import ConfigError
from tests.untimed import UNTIMED


class Numbers:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index])


class Augmented(Numbers):
    """Draws from all three generators that augmentations use."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), numpy.random.rand(), float(torch.rand(()))], dtype=torch.float64)


def samples(length: int = 31, batch: int = 12, micro: int = 3, seed: int = 5, **options: Any) -> Samples:
    return Samples(dataset=options.pop("dataset", Numbers(length)), batch=batch, micro=micro, seed=seed, **options)


@given(length=st.integers(1, 60), micro=st.integers(1, 5), per_batch=st.integers(1, 4), shuffle=st.booleans())
@settings(UNTIMED, max_examples=60)
def test_every_sample_is_there_once_an_epoch(length: int, micro: int, per_batch: int, shuffle: bool) -> None:
    data = samples(length, micro * per_batch, micro, shuffle=shuffle)
    data.check()
    steps = data.steps_per_epoch
    for epoch in range(2):
        batches = [data.micro_batches(step) for step in range(epoch * steps, (epoch + 1) * steps)]
        assert sorted(i for batch in batches for micro_batch in batch for i in micro_batch) == list(range(length))
        assert all(len(batch) == data.num_micro_batches for batch in batches[:-1])
        sizes = [len(micro_batch) for batch in batches for micro_batch in batch]
        assert all(size == micro for size in sizes[:-1]) and 0 < sizes[-1] <= micro


def test_the_last_batch_of_an_epoch_takes_what_is_left() -> None:
    data = samples(31, 12, 3)
    assert data.steps_per_epoch == 3
    assert [len(micro_batch) for micro_batch in data.micro_batches(2)] == [3, 3, 1]
    assert [len(micro_batch) for micro_batch in data.micro_batches(5)] == [3, 3, 1]


def test_the_order_depends_on_seed_and_epoch_and_not_on_what_was_read_before() -> None:
    forwards = [samples().micro_batches(step) for step in range(9)]
    data = samples()
    assert [data.micro_batches(step) for step in (8, 0, 3, 8, 1)] == [forwards[step] for step in (8, 0, 3, 8, 1)]
    assert forwards[0] != forwards[3] != forwards[6]
    assert samples(seed=6).micro_batches(0) != forwards[0]
    one, other = samples(length=31), samples(length=30)
    assert [one.micro_batches(0), other.micro_batches(0), one.micro_batches(0)] == [
        forwards[0], samples(length=30).micro_batches(0), forwards[0],
    ]


def test_without_shuffling_samples_come_as_they_lie() -> None:
    assert samples(7, 4, 2, shuffle=False).micro_batches(0) == [[0, 1], [2, 3]]
    assert samples(7, 4, 2, shuffle=False).micro_batches(1) == [[4, 5], [6]]


def test_augmentation_is_the_same_wherever_and_however_often_a_sample_is_read() -> None:
    data = samples(dataset=Augmented(31))
    first = data.read(1, [4, 9])
    random.random(), numpy.random.rand(), torch.rand(5)
    assert torch.equal(data.read(1, [4, 9]), first)
    assert torch.equal(data.read(2, [4, 9]), first)  # the same epoch
    assert torch.equal(data.read(1, [9])[0], first[1])
    columns = first[:, 1:].flatten().tolist()
    assert len(set(columns)) == len(columns)
    for other in (data.read(3, [4, 9]), samples(dataset=Augmented(31), seed=6).read(1, [4, 9])):
        assert not bool((other[:, 1:] == first[:, 1:]).any())


@pytest.mark.parametrize(("made", "said"), [
    (samples(batch=12, micro=5), "a micro-batch of 5 samples does not divide the batch of 12; try micro=1"),
    (samples(batch=12, micro=8), "try micro=4"),
    (samples(batch=0), "must be at least 1, got 0 and 3"),
    (samples(micro=0), "must be at least 1, got 12 and 0"),
    (samples(length=0), "the dataset is empty"),
    (samples(dataset=iter([])), "must have a length and be indexed by number; a list_iterator is not"),
])
def test_what_cannot_be_cut_into_steps_is_refused(made: Samples, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made.check()


def test_inputs_are_the_first_of_a_pair_or_everything() -> None:
    pair = [torch.ones(3), torch.zeros(3)]
    assert inputs_of(pair) is pair[0]
    for item in (torch.ones(2), {"a": torch.ones(2), "b": torch.ones(2)}, [1, 2, 3]):
        assert inputs_of(item) is item


@pytest.mark.parametrize(("item", "count"), [
    (torch.ones(3, 2), 3), ([torch.ones(4), torch.ones(5)], 4), ({"text": ["a"], "ids": torch.ones(6)}, 6),
    (("a", (torch.tensor(1), torch.ones(2))), 2), ("text", None), ({}, None), (torch.tensor(1), None),
])
def test_samples_are_counted_by_the_first_tensor(item: Any, count: int | None) -> None:
    assert count_of(item) == count
