"""Data by index: the job owns the position, so no loader has to be saved or restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from everstep.engine.samples import Samples, Sized


class Indexed(Samples):
    """A map-style dataset, read in an order that depends on (seed, epoch) alone; every sample once an epoch."""

    def __init__(
        self, dataset: Sized, *, batch: int, micro: int, seed: int = 0, shuffle: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """
        Args:
            dataset: has a length and items by number. An item is a pair (inputs, targets), or one value that serves as both.
            batch: samples a step, whatever the number of workers; the last step of an epoch takes what is left.
            micro: samples a micro-batch; must divide ``batch``.
            seed: of the order, of the initial weights, and of all randomness in layers.
            shuffle: False reads in the dataset's own order.
            collate: makes one item of a micro-batch's items.

        Raises:
            ConfigError: what cannot be cut into steps.
        """
        super().__init__(dataset=dataset, batch=batch, micro=micro, seed=seed, shuffle=shuffle, collate=collate)
        self.check()
