"""The short way through torch's optimizers gives the same bits, and is taken only where nothing would be missed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from everstep.engine import compiler


def trained(kind: Any, short: bool, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5, 2))]
    optimizer = kind(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        compiler.step(optimizer) if short else optimizer.step()
    return [p.detach() for p in parameters]


KINDS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")


@pytest.mark.parametrize("name", KINDS)
def test_the_short_way_gives_the_same_bits(name: str) -> None:
    kind = getattr(torch.optim, name)
    assert all(map(torch.equal, trained(kind, True, lr=0.01), trained(kind, False, lr=0.01)))


def test_hooks_are_called_as_ever() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    parameter.grad = torch.ones(2)
    compiler.step(optimizer)
    assert called == ["after"]


def test_an_optimizer_of_the_users_is_stepped_by_its_own_step() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.fill_(7)

    parameter = torch.nn.Parameter(torch.ones(2))
    compiler.step(Mine([parameter], lr=0.1))
    assert parameter.tolist() == [7, 7]


def test_who_needs_the_compiler_meanwhile_gets_it() -> None:
    program = (
        "import sys, torch\nfrom everstep.engine.compiler import no_compiler\n"
        "with no_compiler():\n    import torch._dynamo\n    assert callable(torch._dynamo.reset)\n"
        "import torch._dynamo\nassert type(sys.modules['torch._dynamo']).__name__ == 'module', sys.modules['torch._dynamo']\n"
        "print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item())\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "2.0"


def test_training_does_not_load_the_compiler() -> None:
    program = (
        "import sys, torch, everstep\n"
        "job = everstep.Job(layers=everstep.sequential(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2))),\n"
        "    loss=lambda y, item: (y - item[1]).square().mean(), optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),\n"
        "    data=everstep.Indexed([(torch.ones(2), torch.zeros(2))] * 8, batch=4, micro=2))\n"
        "from tests.engine.models import layers\nfrom everstep.engine.model import facts_of\nfacts_of(layers(), 5)\n"
        "print([step.run().step for step in job.steps(until=2)], 'torch._dynamo' in sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[0, 1] False"
