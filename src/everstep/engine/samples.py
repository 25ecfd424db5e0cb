"""Which samples a step trains on: a function of the step number alone, never of the plan or of what happened before."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from everstep.engine.model import seed_of
from everstep.errors import ConfigError


class Sized(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A dataset in a shuffled order that depends on (seed, epoch) only.

    ``batch`` samples a step, ``micro`` samples a micro-batch; the last step of an epoch takes what is left.
    """

    dataset: Sized
    batch: int
    micro: int
    seed: int
    shuffle: bool = True
    collate: Callable[[list[Any]], Any] = default_collate

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.dataset) / self.batch)

    @property
    def num_micro_batches(self) -> int:
        """Of a full step."""
        return self.batch // self.micro

    def micro_batches(self, step: int) -> list[list[int]]:
        """The sample ids of each micro-batch of ``step``; fewer, the last one short, in the last step of an epoch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        ids = self._order(epoch)[position * self.batch : (position + 1) * self.batch]
        return [list(map(int, ids[at : at + self.micro])) for at in range(0, len(ids), self.micro)]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.dataset))
        key = (id(self.dataset), len(self.dataset), self.seed, epoch)
        if _ORDERS.get("key") != key:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, 0x5EED))
            _ORDERS.update(key=key, order=torch.randperm(len(self.dataset), generator=generator).tolist())
        return _ORDERS["order"]  # type: ignore[no-any-return]

    def read(self, step: int, ids: list[int]) -> Any:
        """The collated samples ``ids``. Each is read under generators seeded from (seed, epoch, id), so augmentation is the
        same wherever and however often it is read."""
        epoch = step // self.steps_per_epoch
        items = []
        for index in ids:
            seed = seed_of(self.seed, epoch, index)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed visits every kind of device, a hundred times slower
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
            items.append(self.dataset[index])
        return self.collate(items)

    def check(self) -> None:
        """Raises ConfigError for what cannot be cut into steps."""
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise ConfigError(
                f"data: the dataset must have a length and be indexed by number; a {type(self.dataset).__name__} is not"
            )
        if self.batch < 1 or self.micro < 1:
            raise ConfigError(f"data: batch and micro count samples and must be at least 1, got {self.batch} and {self.micro}")
        if self.batch % self.micro:
            raise ConfigError(
                f"data: a micro-batch of {self.micro} samples does not divide the batch of {self.batch}; "
                f"try micro={math.gcd(self.batch, self.micro)}"
            )
        if len(self.dataset) < 1:
            raise ConfigError("data: the dataset is empty")


_ORDERS: dict[str, Any] = {}  # The order of the present epoch: kept once, since it is as long as the dataset.


def inputs_of(item: Any) -> Any:
    """What the first layer is called with: the first of a pair, or the whole item."""
    return item[0] if isinstance(item, tuple | list) and len(item) == 2 else item


def count_of(item: Any) -> int | None:
    """Samples in a collated item: the length of its first tensor."""
    if isinstance(item, torch.Tensor):
        return item.shape[0] if item.dim() else None
    values = item.values() if isinstance(item, dict) else item if isinstance(item, tuple | list) else ()
    return next((count for count in map(count_of, values) if count is not None), None)
