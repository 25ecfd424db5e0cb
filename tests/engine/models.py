"""Small models in float64 for comparisons to the last digits. None has a parameter whose gradient is zero but for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

D = 12
VOCABULARY = 17


class Embed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, D, dtype=dtype) * 0.3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return nn.functional.embedding(tokens_BT[:, :-1], self.weight)


class Block(nn.Module):
    def __init__(self, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=dtype)
        self.up = nn.Linear(D, 2 * D, dtype=dtype)
        self.down = nn.Linear(2 * D, D, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden_BTD)))))


class Head(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, D, dtype=dtype) * 0.3)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(hidden_BTD), self.weight)


def layers(depth: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    def make() -> Iterator[tuple[str, nn.Module]]:
        yield "embed", Embed(dtype)
        for index in range(depth):
            yield f"block.{index}", Block(dropout, dtype)
        yield "head", Head(dtype)

    return make


def token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> tuple[Tensor, float]:
    targets = tokens_BT[:, 1:].reshape(-1)
    logits = logits_BTV.reshape(-1, VOCABULARY)
    return nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=0), float((targets != 0).sum())


class Tokens:
    """Random sequences; token 0 is padding, so counts differ between micro-batches."""

    def __init__(self, samples: int, length: int = 9) -> None:
        generator = torch.Generator().manual_seed(3)
        self._rows = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
        for row, padded in enumerate(torch.randint(0, length - 3, (samples,), generator=generator)):
            if padded:
                self._rows[row, length - int(padded) :] = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
