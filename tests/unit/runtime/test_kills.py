"""Kills are read as they are written, and a mistake in one is named."""

import pytest

from everstep.errors import ConfigError
from everstep.runtime.kills import PHASES, Kill, RandomKills, parse_kill


@pytest.mark.parametrize("kill", [Kill(worker=worker, step=20, phase=phase) for worker in (3, None) for phase in PHASES])
def test_a_kill_that_is_printed_is_read_back(kill: Kill):
    assert parse_kill(str(kill)) == kill


def test_random_kills_keep_their_seed():
    assert parse_kill("random:41") == RandomKills(seed=41)
    assert parse_kill(str(RandomKills(seed=41))) == RandomKills(seed=41)


def test_order_and_spaces_do_not_matter_and_the_phase_may_be_left_out():
    assert parse_kill("step=4, worker=0") == Kill(worker=0, step=4, phase="backward")


@pytest.mark.parametrize(("text", "complaint"), [
    ("worker=3", "step is missing"),
    ("step=3", "worker is missing"),
    ("worker=3,step=1,phase=backwards", "unknown phase 'backwards'; did you mean backward?"),
    ("worker=3,stage=1", "unknown key 'stage'; did you mean"),
    ("worker=3,step=1,step=2", "step is given twice"),
    ("worker=three,step=1", "worker must be a number from 0 or survivable, got 'three'"),
    ("worker=3,step=-1", "step must be a number from 0, got '-1'"),
    ("worker=3;step=1", "step is missing"),
    ("random:x", "seed must be a number from 0, got 'x'"),
    ("", "'' is not key=value"),
])
def test_a_mistake_is_named(text: str, complaint: str):
    with pytest.raises(ConfigError) as caught:
        parse_kill(text)
    assert complaint in str(caught.value)
