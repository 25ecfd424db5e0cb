"""The shipped script is found, and is the model that its text says it is."""

import math
import runpy

import pytest
import torch

from everstep.catalog import scripts, texts
from everstep.errors import ConfigError


def test_a_script_that_is_not_there_is_refused_with_where_it_was_looked_for():
    with pytest.raises(ConfigError, match=r"no script tiny_gtp\.py in .*catalog/examples or .*examples"):
        scripts.path("tiny_gtp")


def test_the_main_jobs_layers_run_in_order_and_know_nothing_yet():
    script = runpy.run_path(str(scripts.path("tiny_gpt")))
    windows = script["Windows"](texts.path("kjv").read_bytes())
    torch.manual_seed(1)
    value = batch = torch.stack([windows[0], windows[len(windows) - 1]])
    assert bytes(batch[0, :8].tolist()) == b"The book"
    for _, module in script["layers"]():
        value = module(value)
    assert script["loss"](value, batch).item() == pytest.approx(math.log(256), abs=0.6)


def test_every_weight_of_the_main_job_gets_a_gradient_that_is_not_only_rounding():
    script = runpy.run_path(str(scripts.path("tiny_gpt")))
    windows = script["Windows"](texts.path("kjv").read_bytes())
    torch.manual_seed(1)
    modules = [module for _, module in script["layers"]()]
    value = batch = torch.stack([windows[number] for number in range(8)])
    for module in modules:
        value = module(value)
    script["loss"](value, batch).backward()
    gradients = {name: p.grad for module in modules for name, p in module.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 1e-6 for gradient in gradients.values())


def test_the_learning_rate_rises_once_and_then_only_falls():
    factor = runpy.run_path(str(scripts.path("tiny_gpt")))["warm_up_then_cosine"]
    factors = [factor(step, 200) for step in range(200)]
    top = factors.index(max(factors))
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert (max(factors), factors[-1]) == (pytest.approx(1.0), pytest.approx(0.1, abs=0.01))
