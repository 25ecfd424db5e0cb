"""A small GPT that learns the bytes of a book: the main job of Everstep's demonstration.

    everstep run --workers 8 examples/tiny_gpt.py --steps 200      # eight processes; kill some while it runs
    python examples/tiny_gpt.py --steps 200                        # one process, the same losses

Shapes: B samples of a micro-batch, T bytes of context, D width, H heads, V byte values.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import everstep
from everstep.catalog import texts
from everstep.config import PlannerConfig, RunConfig

T, D, H, V, BLOCKS = 64, 64, 4, 256, 6


class Windows(torch.utils.data.Dataset[Tensor]):
    """The text cut into windows of T + 1 bytes. A byte is its own token, so there is no vocabulary to learn or ship."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // T

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * T : index * T + T + 1].long()


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, window_BT: Tensor) -> Tensor:  # the window with its target: the last byte is only predicted
        return self.byte(window_BT[:, :-1]) + self.position.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (H, D // H)).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, dim=2)
        )
        mixed_BTD = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(mixed_BTD)
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm_2(x_BTD))))


def layers() -> Iterator[tuple[str, nn.Module]]:
    """The model in the order in which it may be cut. A worker builds only the layers that it holds."""
    yield "embed", Embed()
    for index in range(BLOCKS):
        yield f"block.{index}", Block()
    yield "head", nn.Sequential(nn.LayerNorm(D), nn.Linear(D, V))


def loss(logits_BTV: Tensor, window_BT: Tensor) -> Tensor:
    """Mean cross-entropy of each window's next bytes, in nats."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), window_BT[:, 1:].flatten())


def warm_up_then_cosine(step: int, steps: int, warm_up: int = 20) -> float:
    """The learning rate's factor: up to 1 in ``warm_up`` steps, then down to a tenth along half a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    job = everstep.Job(
        layers=layers,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
        lr=lambda step: warm_up_then_cosine(step, steps),
        clip_norm=1.0,
        data=everstep.Indexed(Windows(texts.path("kjv").read_bytes()), batch=32, micro=4, seed=7),
        config=RunConfig(planner=PlannerConfig(worker_memory_bytes=3_000_000)),  # the model with its state needs 5.4 MB
    )
    for step in job.steps(until=steps):
        result = step.run()
        if job.is_reporter and (step.number % 20 == 0 or step.number == steps - 1):
            print(f"step {step.number:4d}  loss {result.loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
