"""Shipped traces have the figures that their sources state; a wrong file is refused by line."""

from pathlib import Path

import pytest

from everstep import trace as traces
from everstep.catalog.trace_files import SHIPPED, load_trace
from everstep.errors import ConfigError
from everstep.trace import Change, Trace


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_trace_can_be_played(name: str):
    assert traces.problems(load_trace(name)) == []


def test_p3_has_the_losses_joins_and_gaps_that_are_known_of_it():
    p3 = load_trace("p3")
    losing = [change for change in p3.changes if change.lost]
    assert (len(p3.nodes), p3.most_nodes, p3.num_losses, p3.num_joins) == (18, 32, 167, 159)
    assert (len(p3.changes), len(losing), max(len(change.lost) for change in losing)) == (162, 79, 6)
    assert p3.mean_gap_s == pytest.approx(254, abs=2)


def test_the_same_trace_published_twice_is_the_same():
    assert load_trace("parcae-p3").changes == load_trace("p3").changes


def test_of_several_faults_of_a_server_the_first_takes_it_and_the_last_gives_it_back():
    trace = load_trace("infinitehbd")
    assert len(trace.nodes) == 400
    assert 480 < trace.num_losses <= 584


def test_published_counts_are_sorted_and_become_losses_and_joins():
    trace = load_trace("gcp-a100")
    assert trace.most_nodes == 64
    assert max(len(change.lost) for change in trace.changes) == 36


def test_a_trace_of_more_nodes_is_folded_onto_fewer_by_their_number():
    trace = load_trace("gcp-a100").folded(32)
    assert traces.problems(trace) == []
    assert trace.most_nodes <= 32


def test_a_folded_node_is_away_only_while_all_that_stand_for_it_are():
    whole = Trace(name="four", nodes=("a", "b", "c", "d"), end_s=9.0, changes=(
        Change(at_s=1.0, lost=("a",)), Change(at_s=2.0, lost=("c",)), Change(at_s=3.0, joined=("a",)),
    ))
    assert whole.folded(2).changes == (Change(at_s=2.0, lost=("node1",)), Change(at_s=3.0, joined=("node1",)))


def test_a_trace_can_begin_when_enough_nodes_are_there():
    g4dn = load_trace("g4dn").beginning_with(4)
    assert len(g4dn.nodes) >= 4
    assert traces.problems(g4dn) == []
    with pytest.raises(ValueError, match="never has 99 nodes"):
        g4dn.beginning_with(99)


@pytest.mark.parametrize(("text", "complaint"), [
    ("0,add,a\n5,add,b\n4,remove,a\n", "bad.csv, line 3: not sorted by time: 4 comes after 5"),
    ("0,add,a\n\n5,remove,b\n", "bad.csv, line 3: 'b' is removed, but no such node is there"),
    ("0,add,a\n0,add,a\n", "bad.csv, line 2: 'a' is added, but it is there already"),
    ("0,add,a\n1,kill,a\n", "bad.csv, line 2: want add or remove, got 'kill'"),
    ("0,add\n", "bad.csv, line 1: want milliseconds,add|remove,node, got '0,add'"),
    ("-3,add,a\n", "bad.csv, line 1: want milliseconds, got '-3'"),
    ("soon,add,a\n", "bad.csv, line 1: want milliseconds, got 'soon'"),
    ("", "bad.csv: nobody is there at the start"),
])
def test_a_wrong_line_is_named_with_what_was_expected(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_trace("bad.csv")
    assert str(refused.value) == complaint


@pytest.mark.parametrize(("name", "text", "complaint"), [
    ("bad.txt", "2021-12-11, noon, 3\n", "bad.txt, line 1: want a moment such as 2021-12-11, 11:11:30, got 2021-12-11, noon"),
    ("bad.txt", "2021-12-11, 11:11:30\n", "bad.txt, line 1: want date, time, count"),
    ("bad.json", "{", "bad.json: not valid JSON"),
    ("bad.json", "[1]", "bad.json: want a list of faults"),
    ("bad.json", '[{"node_id": "a", "event_time": 1, "event_type": "fault_end"}]', "bad.json, entry 1: a ends a fault"),
    ("bad.yaml", "", "bad.yaml: a trace ends in .csv, .txt or .json"),
])
def test_other_formats_are_refused_as_plainly(
    name: str, text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=complaint.replace("|", r"\|")):
        load_trace(name)


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean g4dn"):
        load_trace("g4dm")
