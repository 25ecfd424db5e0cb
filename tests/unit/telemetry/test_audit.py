"""Rules of the audit: what it finds, and what it rightly lets pass."""

from pathlib import Path

import pytest

from everstep import records
from everstep.telemetry import runs
from everstep.telemetry.audit import Audit, audit
from everstep.telemetry.line import surviving
from tests.unit.telemetry.story import N0, N1, N2, N3, REROUTED, WHOLE, Story, samples, whole_story


@pytest.fixture
def story() -> Story:
    return whole_story()


def audited(story: Story, folder: Path) -> Audit:
    return audit(runs.read(story.write(folder / "run")))


def test_a_step_that_was_redone_after_a_kill_leaves_the_account_right(story: Story, tmp_path: Path):
    found = audited(story, tmp_path)
    assert found == Audit(steps=6, samples_seen=20, samples_lost=0, samples_repeated=0, problems=())


def test_one_layer_that_counts_a_micro_batch_twice_is_found(story: Story, tmp_path: Path):
    story.change(N1, 4, pairs={"block/block": (0, 1, 1), "embed.weight/head": (0, 1), "head.bias/head": (0, 1)})
    found = audited(story, tmp_path)
    assert found.problems == (
        "step 4 (view 2, attempt 0): block/block counts micro-batch 1 2 times (n1, n1)",
        "epoch 1: sample 2 counts 2 times", "epoch 1: sample 3 counts 2 times",
    )
    assert (found.samples_lost, found.samples_repeated) == (0, 2)


def test_two_nodes_that_count_the_same_micro_batch_are_found_and_named(story: Story, tmp_path: Path):
    story.change(N0, 4, pairs={"embed.weight/embed": (0, 1)})
    found = audited(story, tmp_path)
    assert "step 4 (view 2, attempt 0): embed.weight/embed counts micro-batch 1 2 times (n0, n2)" in found.problems


def test_a_micro_batch_that_one_use_of_a_tied_unit_lacks_is_lost(story: Story, tmp_path: Path):
    story.change(N1, 4, pairs={"block/block": (0, 1), "embed.weight/head": (0,), "head.bias/head": (0, 1)})
    found = audited(story, tmp_path)
    assert found.problems == ("step 4 (view 2, attempt 0): micro-batch 1 is not counted by embed.weight/head",)
    assert (found.samples_lost, found.samples_seen) == (2, 18)


def test_the_account_of_a_node_that_was_killed_later_still_counts(story: Story, tmp_path: Path):
    del story.nodes[N3]
    found = audited(story, tmp_path)
    assert found.samples_lost == 4, "n3 counted micro-batch 1 in steps 0 and 1"
    assert any("step 0 (view 1, attempt 0): micro-batch 1 is not counted by" in problem for problem in found.problems)


def test_a_skipped_sample_is_lost(story: Story, tmp_path: Path):
    story.change(N2, 4, samples={1: samples(4, 1)[:1]})
    story.change(N1, 4, samples={0: samples(4, 0), 1: samples(4, 1)[:1]})
    found = audited(story, tmp_path)
    assert found.problems == ("step 4 (view 2, attempt 0): micro-batch 1 has 1 samples, expected 2",)
    assert (found.samples_lost, found.samples_repeated) == (1, 0)


def test_a_sample_that_an_earlier_step_of_the_epoch_had_is_repeated(story: Story, tmp_path: Path):
    story.change(N0, 1, samples={0: samples(0, 0)})
    story.change(N1, 1, samples={0: samples(0, 0)})
    found = audited(story, tmp_path)
    assert found.problems == ("epoch 0: sample 0 counts 2 times", "epoch 0: sample 1 counts 2 times")
    assert (found.samples_lost, found.samples_repeated) == (2, 2)


def test_the_same_sample_in_another_epoch_is_no_repetition(story: Story, tmp_path: Path):
    assert samples(0, 0) != samples(3, 0)
    assert set(samples(0, 0)) <= {sample for step in (3, 4, 5) for m in range(2) for sample in samples(step, m)}
    assert audited(story, tmp_path).samples_repeated == 0


def test_first_and_last_stage_that_read_different_samples_are_found(story: Story, tmp_path: Path):
    story.change(N1, 4, samples={0: (8, 9), 1: samples(4, 1)})
    found = audited(story, tmp_path)
    assert found.problems == ("step 4 (view 2, attempt 0): micro-batch 0 is samples 5, 4 on n0, but 8, 9 on n1",)


def test_a_sample_outside_the_data_set_is_found(story: Story, tmp_path: Path):
    story.change(N0, 5, samples={0: (0, 10)})
    story.change(N1, 5, samples={0: (0, 10)})
    found = audited(story, tmp_path)
    assert "epoch 1: sample 10 is not in the data set of 10" in found.problems
    assert found.samples_lost == 1


def test_a_step_that_nobody_committed_is_found(story: Story, tmp_path: Path):
    for node, lines in story.nodes.items():
        story.nodes[node] = [r for r in lines if not (isinstance(r, records.Committed) and r.step == 1)]
    found = audited(story, tmp_path)
    assert found.problems == ("step 1 was never committed",)
    assert (found.steps, found.samples_lost) == (5, 4)


def test_a_run_that_says_it_is_done_but_lacks_its_last_steps_is_found(story: Story, tmp_path: Path):
    for node, lines in story.nodes.items():
        story.nodes[node] = [r for r in lines if not (isinstance(r, records.Committed) and r.step == 5)]
    assert audited(story, tmp_path).problems == (
        "the run says it is done with 6 steps, but the last that was committed is 4",
    )


def test_nodes_that_report_different_losses_for_a_step_are_found(story: Story, tmp_path: Path):
    story.nodes[N2][-1] = records.Committed(node=N2, view=2, step=5, attempt=0, loss=4.25)
    assert audited(story, tmp_path).problems == (
        "step 5 (view 2, attempt 0): nodes report different losses: 4.5 on n0, n1; 4.25 on n2",
    )


def test_a_union_that_died_with_its_only_holder_may_be_followed_by_a_redo(story: Story, tmp_path: Path):
    story.write_as(N3, records.Committed(node=N3, view=1, step=3, attempt=0, loss=4.7))
    assert audited(story, tmp_path).problems == ()


def test_a_node_that_committed_a_step_and_then_its_redo_is_found(tmp_path: Path):
    story = whole_story()
    story.nodes[N2].insert(7, records.Committed(node=N2, view=1, step=3, attempt=0, loss=4.7))
    assert audited(story, tmp_path).problems == (
        "n2 committed step 3 (view 1, attempt 0) and went on in view 2, where the step was committed again as attempt 1",
    )


def test_steps_that_were_rolled_back_do_not_count_and_are_listed(tmp_path: Path):
    story = rolled_back_story()
    run = runs.read(story.write(tmp_path / "run"))
    line = surviving(run)
    assert audit(run).problems == ()
    assert [(back.from_step, back.to_step, back.losses) for back in line.rolled_back] == [(4, 2, (4.8, 4.7))]
    assert line.losses == (5.0, 4.9, 4.0, 3.0)


def test_a_rollback_that_was_not_recorded_is_a_step_committed_twice(tmp_path: Path):
    story = rolled_back_story()
    story.agent = [r for r in story.agent if not isinstance(r, records.RolledBack)]
    found = audited(story, tmp_path)
    assert any("committed step 2 (view 1, attempt 0) and went on in view 2" in problem for problem in found.problems)


def test_steps_that_were_resumed_before_do_not_count(tmp_path: Path):
    story = Story()
    story.start(until=4)
    story.adopt(1, WHOLE, 0, "start", "start")
    for step in range(3):
        story.commit(WHOLE, 1, step)
    story.start(first_step=2, until=4)
    story.adopt(2, REROUTED, 2, "start", "resumed")
    for step in (2, 3):
        story.commit(REROUTED, 2, step, attempt=1)
    story.end(steps=4)
    run = runs.read(story.write(tmp_path / "run"))
    assert audit(run) == Audit(steps=4, samples_seen=14, samples_lost=0, samples_repeated=0, problems=())
    assert [(back.from_step, back.to_step) for back in surviving(run).rolled_back] == [(3, 2)]


def test_a_run_that_begins_in_the_middle_of_an_epoch_is_not_blamed_for_what_came_before(tmp_path: Path):
    story = Story()
    story.start(first_step=2, until=4)
    story.adopt(1, WHOLE, 2, "start", "start")
    for step in (2, 3):
        story.commit(WHOLE, 1, step)
    story.end(steps=4)
    assert audited(story, tmp_path) == Audit(steps=2, samples_seen=6, samples_lost=0, samples_repeated=0, problems=())


def rolled_back_story() -> Story:
    """Four steps, then all of n1 and n3 is lost: back to step 2, and up to step 4 on n0 and a new pair of holders."""
    story = Story()
    story.start(until=4)
    story.adopt(1, WHOLE, 0, "start", "start")
    for step in range(4):
        story.commit(WHOLE, 1, step)
    story.agent.append(records.RolledBack(time_s=story.now_s, view=2, from_step=4, to_step=2))
    story.adopt(2, REROUTED, 2, "restore", "n3 lost", attempt=1)
    for step, loss in ((2, 4.0), (3, 3.0)):
        story.commit(REROUTED, 2, step, attempt=1, loss=loss)
    story.end(steps=4)
    return story
