"""Summary, status, explanations, grid, words, display and picture say what the records say."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from everstep import records
from everstep.errors import ConfigError
from everstep.plan import Order
from everstep.telemetry import explain, forecasts, grid, picture, runs, status, summary, words
from everstep.telemetry.display import Display, Logs
from everstep.telemetry.summary import Summary
from tests.unit.telemetry.story import N1, N3, REROUTED, WHOLE, Story, view, whole_story

SUMMARY_KEYS = {
    "steps", "loss", "samples_seen", "samples_lost", "samples_repeated", "events", "state_hash", "seed", "numerics",
    "outcome", "rolled_back", "goodput", "step_s_p50", "plans",
}
EVENT_KEYS = {
    "time_s", "step", "phase", "node", "policy", "decision", "detect_s", "decide_s", "stall_s", "step_s_before",
    "step_s_after", "step_s_predicted", "kind",
}


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    return runs.read(whole_story().write(tmp_path / "run"))


def test_a_summary_has_exactly_the_keys_that_are_promised(run: runs.Run):
    plain = summary.to_json(summary.summary(run))
    assert set(plain) == SUMMARY_KEYS
    assert [set(event) for event in plain["events"]] == [EVENT_KEYS]
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain


def test_a_summary_says_what_the_records_say(run: runs.Run):
    found = summary.summary(run)
    assert found.loss == pytest.approx([5.0, 4.9, 4.8, 4.7, 4.6, 4.5])
    assert (found.steps, found.outcome, found.seed, found.state_hash) == (6, "done", 7, {"block": {"n1": "ab12"}})
    assert found.goodput == pytest.approx(20 / 1.7), "20 samples in six steps of 0.25 s and a stall of 0.2 s"
    assert found.step_s_p50 == 0.25


def test_a_run_without_an_end_is_unfinished(tmp_path: Path):
    story = whole_story()
    del story.agent[-1]
    run = runs.read(story.write(tmp_path / "run"))
    assert summary.summary(run).outcome == "unfinished"
    assert status.status(run).outcome is None


def test_a_run_before_its_first_step_has_a_summary_and_a_status(tmp_path: Path):
    story = Story()
    story.start()
    run = runs.read(story.write(tmp_path / "run"))
    assert (summary.summary(run).steps, summary.summary(run).goodput) == (0, 0.0)
    assert "step 0/6" in status.text(status.status(run), run.directory)


def test_status_follows_the_records(run: runs.Run):
    now = status.status(run)
    assert (now.step, now.until, now.outcome, now.view, now.lost) == (6, 6, "done", 2, (N3,))
    assert now.plan == REROUTED
    assert now.events == ("worker 3 killed in step 3 (backward); reroute chosen: 3 candidates; stall 0.21 s",)
    assert (now.checkpoint, now.checkpoint_step) == ("checkpoints/6", 6)
    assert now.goodput == pytest.approx(20 / 1.7)


def test_time_left_is_the_steps_left_at_the_pace_of_late():
    story = whole_story()
    tracker = status.Tracker()
    for record in story.agent:
        tracker.on(record)
        if isinstance(record, records.StepSeen) and record.step == 3:
            assert tracker.status.left_s == pytest.approx(2 * 0.25)
    assert tracker.status.left_s is None


def test_samples_that_were_rolled_back_leave_the_goodput():
    story = whole_story()
    tracker = status.Tracker()
    for record in story.agent[:-1]:
        tracker.on(record)
    tracker.on(records.RolledBack(time_s=story.now_s, view=3, from_step=6, to_step=4))
    assert tracker.status.step == 4
    tracker.on(records.StepSeen(time_s=story.now_s + 0.25, step=4, attempt=1, loss=1.0, step_s=0.25))
    assert tracker.status.goodput == pytest.approx((20 - 6 + 4) / 1.95)
    assert tracker.status.events[-1] == "state was lost; back from step 6 to step 4"


def test_status_as_json_holds_the_plan_as_routes_and_placement(run: runs.Run):
    plain = status.to_json(status.status(run))
    assert plain["plan"]["pipelines"][1] == {"hops": ["n2[0:1]", "n1[1:3]"], "micro_batches": [1]}
    assert plain["plan"]["placement"]["n1"] == [1, 2]
    msgspec.json.encode(plain)


def test_each_plan_has_what_was_predicted_beside_what_was_measured(run: runs.Run):
    first, second = summary.to_json(summary.summary(run))["plans"]
    assert (first["layout"], first["guessed"], first["nodes"], first["steps"]) == ("2+2", True, 4, 1)
    assert second == {
        "view": 2, "step": 3, "policy": "reroute", "layout": "rerouted", "nodes": 3, "steps": 1, "predicted_s": 0.3,
        "measured_s": 0.25, "guessed": False, "error_percent": pytest.approx(20.0),
    }, "of its three steps the first has the stall in it, and step 5 is the short end of an epoch"
    assert status.to_json(status.status(run))["plans"] == [first, second]


def test_a_plan_under_which_only_one_step_was_trained_has_no_measure():
    story = whole_story()
    found = forecasts.of(tuple(story.agent[:4]))
    assert [(one.measured_s, one.error_percent, one.steps) for one in found] == [(None, None, 0)]


def test_the_words_of_a_layout_say_what_is_not_plain():
    plan = replace(WHOLE, order=Order(split=True, extra_slots=2), placement={**WHOLE.placement, "n9": ()})
    assert forecasts.layout(plan) == "2+2, split backward, 2 more slots, 1 spare"


def test_an_explanation_sets_the_measured_step_beside_the_predicted_one(run: runs.Run):
    first, second = explain.explain(run)
    assert (first.number, first.policy, second.number, second.policy) == (1, "start", 2, "reroute")
    assert second.step_s_measured == 0.25
    said = explain.text(second)
    assert "n3 lost: step 3, view 2" in said
    assert "predicted to take 0.30 s and took 0.25 s" in said
    assert "no spare is left" in said


def test_an_explanation_that_is_not_there_is_refused_with_those_that_are(run: runs.Run):
    assert explain.explain(run, 2)[0].number == 2
    with pytest.raises(ConfigError, match=r"no decision 3 .* there are 1 to 2"):
        explain.explain(run, 3)


def test_a_grid_marks_who_stands_in_for_a_lost_node():
    assert grid.text(grid.grid(WHOLE)) == "n0 0  n1 1–2  ×1\nn2 0  n3 1–2  ×1"
    assert grid.text(grid.grid(REROUTED, frozenset({N3}))) == "n0 0  n1 1–2   ×1\nn2 0  n1* 1–2  ×1\nlost: n3"


def test_a_grid_names_the_spares():
    spared = replace(WHOLE, placement={**WHOLE.placement, "n9": ()})
    assert grid.text(grid.grid(spared)).endswith("spare: n9")


def test_an_event_of_several_workers_names_them_all():
    seen = records.EventSeen(
        time_s=1.0, step=9, phase="reduce", node="n1,n3", policy="shrink", decision="", detect_s=0.0, decide_s=0.0,
        stall_s=0.002, step_s_before=1.0, step_s_after=1.0, step_s_predicted=1.0,
    )
    assert words.event(seen, {N1: 1, N3: 3}, 1) == (
        "workers 1 and 3 killed in step 9 (reduce); shrink chosen: 1 candidate; stall 2.0 ms"
    )
    assert words.event(seen, {N1: 1}, 1).startswith("n1 and n3 killed")


def test_without_a_terminal_the_display_prints_plain_lines():
    said = shown(whole_story(), terminal=False)
    assert said.count("step ") >= 6
    assert "worker 3 killed in step 3 (backward); reroute chosen: 3 candidates; stall 0.21 s" in said
    assert "\x1b" not in said


def test_in_a_terminal_the_display_draws_the_pipelines():
    said = shown(whole_story(), terminal=True)
    assert "n1* 1–2" in said
    assert "lost n3" in said
    assert "step 6/6" in said


def test_output_of_a_worker_is_shown_as_text_and_never_as_markup(tmp_path: Path):
    (tmp_path / "n0.txt").write_text("loss [bold]4.5[/bold] [/nothing]\n")
    assert "n0 │ loss [bold]4.5[/bold] [/nothing]" in shown(whole_story(), terminal=False, logs=tmp_path)


def test_a_line_of_output_is_shown_once_and_only_when_it_is_complete(tmp_path: Path):
    logs = Logs(tmp_path)
    with (tmp_path / "n0.txt").open("w") as file:
        file.write("one\ntw")
        file.flush()
        assert list(logs.new_lines()) == [("n0", "one")]
        file.write("o\n")
        file.flush()
        assert list(logs.new_lines()) == [("n0", "two")]
        assert list(logs.new_lines()) == []
    logs.close()


def test_the_end_of_a_run_names_what_was_survived(run: runs.Run):
    said = words.summary(summary.summary(run), 1.7, run.directory)
    assert "Done: 6 steps in 1.70 s, loss 5.0000 → 4.5000" in said
    assert "Survived 1 failure of 1 worker: median stall 0.21 s" in said
    assert "0 samples lost, 0 repeated, 20 counted" in said


def test_the_picture_of_two_runs_is_a_png(run: runs.Run, tmp_path: Path):
    value: Summary = summary.summary(run)
    picture.draw(value, value, 3.0, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert picture.differences([1.0, 2.0], [1.5, 2.0, 3.0]) == [0.5, 0.0]


def test_nodes_that_join_are_not_lost():
    tracker = status.Tracker()
    for number, nodes in ((1, WHOLE.nodes), (2, REROUTED.nodes), (3, (*REROUTED.nodes, "n4"))):
        tracker.on(records.ViewCommitted(time_s=0.0, view=view(number, *nodes), cause=""))
    assert tracker.status.lost == (N3,)
    assert len(tracker.status.nodes) == 4


def shown(story: Story, *, terminal: bool, logs: Path | None = None) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    with Display(console, logs) as display:
        for record in story.agent:
            display.on(record)
    return console.file.getvalue()


def test_a_step_whose_time_is_not_known_gives_no_pace():
    story = whole_story()
    tracker = status.Tracker()
    tracker.on(story.agent[0])
    tracker.on(records.StepSeen(time_s=1.0, step=0, attempt=0, loss=5.0, step_s=0.0))
    assert (tracker.status.samples_per_s, tracker.status.goodput, tracker.status.loss) == (0.0, 0.0, 5.0)
