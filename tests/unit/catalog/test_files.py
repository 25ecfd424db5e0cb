"""Clusters and workloads from files, and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep import catalog
from everstep import cluster as clusters
from everstep import workload as workloads
from everstep.catalog.files import load_cluster, load_workload, names
from everstep.cluster import Link
from everstep.errors import ConfigError
from everstep.quantities import HostId, NodeId, UnitName

CLUSTER = """
[link]
alpha_s = "0.2ms"
bytes_per_s = "1GB"
[[hosts]]
name = "one"
nodes = 2
cores = 1
memory_bytes = "24MB"
[[hosts]]
name = "two"
nodes = 1
speed = 0.5
"""
WORKLOAD = """
micro_batches = 4
[[layers]]
name = "embed"
forward_s = "1ms"
backward_input_s = 0
backward_weight_s = "2ms"
ties = ["table"]
[[layers]]
name = "block"
count = 2
forward_s = "1ms"
backward_input_s = "1ms"
backward_weight_s = "1ms"
parameter_bytes = "1KB"
state_bytes = "3KB"
[[layers]]
name = "head"
forward_s = "1ms"
backward_input_s = "1ms"
backward_weight_s = "1ms"
ties = ["table"]
[[tied]]
name = "table"
parameter_bytes = 10
state_bytes = 30
gradient_bytes = 10
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", names("cluster"))
def test_shipped_clusters_can_be_planned_for(name: str) -> None:
    assert clusters.problems(load_cluster(name)) == []


@pytest.mark.parametrize("name", names("workload"))
def test_shipped_workloads_can_be_planned_for(name: str) -> None:
    assert workloads.problems(load_workload(name)) == []


def test_what_is_shipped_is_listed() -> None:
    assert names("cluster") == (
        "cluster-1024", "cluster-16384", "cluster-2x16", "cluster-30", "cluster-32", "cluster-48", "cluster-8",
    )
    assert names("workload") == (
        "workload-gpt-1.3b", "workload-gpt-124m", "workload-gpt-2.7b", "workload-gpt-350m", "workload-gpt-6.7b",
        "workload-llama-70b", "workload-llama-7b", "workload-tiny-gpt",
    )
    assert all(len(load_cluster(f"cluster-{count}").nodes) == count for count in (8, 30, 32, 48, 1024, 16384))
    parameters = sum(unit.parameter_bytes for unit in load_workload("workload-gpt-124m").units.values()) / 4
    assert parameters == pytest.approx(124e6, rel=0.01)


@pytest.mark.parametrize(("name", "expected"), [
    ("gpt-350m", 0.355e9), ("gpt-1.3b", 1.3e9), ("gpt-2.7b", 2.65e9), ("gpt-6.7b", 6.66e9), ("llama-7b", 6.74e9),
    ("llama-70b", 69e9),
])
def test_computed_workloads_have_the_parameters_that_their_names_say(name: str, expected: float) -> None:
    units = load_workload(f"workload-{name}").units.values()
    assert sum(unit.parameter_bytes for unit in units) / 2 == pytest.approx(expected, rel=0.02)
    assert all(unit.state_bytes == 7 * unit.parameter_bytes for unit in units)


def test_the_largest_shipped_workloads_fit_the_clusters_that_they_are_meant_for() -> None:
    for cluster, workload, shape in (
        ("cluster-32", "gpt-6.7b", "8×4"), ("cluster-1024", "llama-7b", None), ("cluster-16384", "llama-70b", None),
    ):
        hardware, job = load_cluster(cluster), load_workload(f"workload-{workload}")
        state = sum(unit.held_bytes for unit in job.units.values())
        memory = sum(node.memory_bytes or 0 for node in hardware.nodes.values())
        assert 2 * state < memory, f"{cluster} keeps two replicas of {shape or workload}"


def test_hosts_may_be_counted(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, '[[hosts]]\nname = "h"\ncount = 2\nnodes = 2\n'))
    assert [node.host for node in found.nodes.values()] == ["h0", "h0", "h1", "h1"]


def test_nodes_are_numbered_host_by_host(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, CLUSTER))
    assert list(found.nodes) == ["n0", "n1", "n2"]
    assert (found.nodes[NodeId("n0")].memory_bytes, found.nodes[NodeId("n2")].memory_bytes) == (24_000_000, None)
    assert (found.nodes[NodeId("n2")].host, found.nodes[NodeId("n2")].speed) == ("two", 0.5)
    assert found.host_cores == {HostId("one"): 1, HostId("two"): None}
    assert (found.link.alpha_s, found.link.bytes_per_s) == (0.0002, 1e9)


def test_layers_are_repeated_and_tied(tmp_path: Path) -> None:
    found = load_workload(written(tmp_path, WORKLOAD))
    assert [layer.name for layer in found.layers] == ["embed", "block.0", "block.1", "head"]
    assert found.units[UnitName("table")].layers == (0, 3)
    assert set(found.units) == {"block.0", "block.1", "table"}
    assert found.layers[0].backward_weight_s == 0.002


TWO_SITES = """
[link]
bytes_per_s = "10GB"
[host_link]
alpha_s = "1ms"
bytes_per_s = "90GB"
[[site_links]]
between = ["west", "east"]
alpha_s = "10ms"
bytes_per_s = "1GB"
[[hosts]]
name = "a"
nodes = 2
site = "east"
[[hosts]]
name = "b"
nodes = 1
site = "east"
[[hosts]]
name = "c"
nodes = 1
site = "west"
"""


def test_hosts_lie_at_sites_and_links_depend_on_where_nodes_are(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, TWO_SITES))
    n0, n1, n2, n3 = found.nodes
    assert found.sites() == {"east": (n0, n1, n2), "west": (n3,)}
    assert found.hosts() == {"a": (n0, n1), "b": (n2,), "c": (n3,)}
    rates = [found.link_between(n0, other).bytes_per_s for other in (n1, n2, n3)]
    assert rates == [90e9, 10e9, 1e9]
    assert found.link_between(n3, n0) == found.link_between(n0, n3) == Link(alpha_s=0.01, bytes_per_s=1e9)


def test_what_is_left_out_of_a_hosts_link_is_as_between_hosts(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, TWO_SITES.replace('alpha_s = "1ms"\n', "", 1)))
    assert found.host_link == Link(alpha_s=found.link.alpha_s, bytes_per_s=90e9)


def test_a_host_may_have_nodes_of_two_sorts(tmp_path: Path) -> None:
    found = load_cluster(written(tmp_path, CLUSTER.replace('"two"', '"one"\ncores = 1')))
    assert [(node.host, node.speed) for node in found.nodes.values()] == [("one", 1.0), ("one", 1.0), ("one", 0.5)]


def test_the_shipped_clusters_of_two_sites_and_of_two_sorts_of_hosts_are_what_they_say() -> None:
    two = load_cluster("cluster-2x16")
    assert [len(nodes) for nodes in two.sites().values()] == [16, 16]
    assert two.one_link is None
    assert sorted({len(nodes) for nodes in load_cluster("cluster-48").hosts().values()}) == [4, 8]


@pytest.mark.parametrize(("old", "new", "said"), [
    ("cores = 1", "core = 1", "mine.toml, line 8: hosts 1: unknown key 'core'; did you mean cores?"),
    ('"0.2ms"', '"0.2 parsecs"', "line 3: link: alpha_s: not a duration: '0.2 parsecs' (want for example 30s, 10m or 1h)"),
    ('"0.2ms"', "inf", "line 3: link: alpha_s must be at most 1,000,000,000 seconds, got inf"),
    ('"0.2ms"', "true", "line 3: link: alpha_s: not a duration: True"),
    ('"1GB"', '"0GB"', "line 4: link: bytes_per_s must be positive, got '0GB'"),
    ('"1GB"', '"1GBps"', "line 4: link: bytes_per_s: not a size: '1GBps'"),
    ('"24MB"', '"24MX"', "line 9: hosts 1: memory_bytes: not a size: '24MX' (want for example 24MB or 2GiB)"),
    ('"24MB"', "-24", "line 9: hosts 1: memory_bytes: bytes cannot be negative or endless: -24"),
    ('"24MB"', "0", "line 9: hosts 1: memory_bytes must be positive, got 0"),
    ('"24MB"', f'"{"9" * 400}MB"', "line 9: hosts 1: memory_bytes: bytes cannot be endless: 99999999999999999999…"),
    ("nodes = 2", "nodes = -2", "line 7: hosts 1: nodes must be a whole number from 1, got -2"),
    ("nodes = 2", "nodes = 2.5", "line 7: hosts 1: nodes must be a whole number from 1, got 2.5"),
    ("nodes = 2", "nodes = 5_000_000", "line 7: hosts 1: nodes must be at most 1,000,000, got 5000000"),
    ("nodes = 2", "nodes = 800_000\ncount = 2", "line 7: hosts 1: nodes would make more than 1,000,000 nodes, got 800000"),
    ("speed = 0.5", "speed = -1", "line 13: hosts 2: speed must be positive, got -1"),
    ("speed = 0.5", "speed = nan", "line 13: hosts 2: speed must be positive, got nan"),
    ("speed = 0.5", 'speed = "fast"', "line 13: hosts 2: speed must be a number, got 'fast'"),
    ('name = "two"', "", "mine.toml, line 10: hosts 2: name is missing"),
    ('name = "two"', 'name = "one"', "line 10: hosts 2: cores must be as before for host one, got None"),
    ("[link]", "[links]", "mine.toml, line 2: unknown key 'links'; did you mean link?"),
    ("[link]", "[link", "mine.toml: not valid TOML"),
    ("[link]", "link = 3\n[more]", "mine.toml, line 3: unknown key 'more'"),
    ("speed = 0.5", f"speed = {'9' * 5000}", "mine.toml: not valid TOML: Exceeds the limit (4300 digits)"),
    ("speed = 0.5", f"speed = {'9' * 400}", "line 13: hosts 2: speed must be between 0.000001 and 1,000,000, got 9999"),
    ('"24MB"', f"{'9' * 400}", "line 9: hosts 1: memory_bytes must be at most 1,000,000,000,000,000,000 bytes, got 9999"),
    ("speed = 0.5", f"speed = {'[' * 3000}", "mine.toml: not valid TOML"),
    ("[link]", "link = { alpha = 1 }\n[host_link]", "mine.toml, line 2: link: unknown key 'alpha'; did you mean alpha_s?"),
    ("[link]", "# 'it''s'\nlinks = \"\"\"\n[link]\n\"\"\"", "mine.toml, line 3: unknown key 'links'; did you mean link?"),
], ids=lambda value: value[:24])
def test_a_wrong_cluster_is_told_where_and_what_was_expected(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(written(tmp_path, CLUSTER.replace(old, new, 1)))
    assert said in str(caught.value)


@pytest.mark.parametrize(("old", "new", "said"), [
    ('["west", "east"]', '["west", "eats"]', "line 8: site_links 1: between: no host is at site 'eats'; did you mean east?"),
    ('["west", "east"]', '["west"]', 'line 8: site_links 1: between must name two sites, for example ["east", "west"], got'),
    ('["west", "east"]', '["west", "west"]', "line 8: site_links 1: between must name two sites"),
    ('alpha_s = "10ms"', "", "line 7: site_links 1: alpha_s is missing"),
    ('"east"]', '"east"]\nalpha_s = 1\nbytes_per_s = 1\n[[site_links]]\nbetween = ["east", "west"]',
     "line 12: site_links 2: between must be another pair than before"),
    ("[[site_links]]", "[site_links]", "line 7: site_links must be a list of tables, [[site_links]], got {"),
    ('site = "west"', 'site = "north"', "site_links 1: between: no host is at site 'west'"),
    ('name = "c"', 'name = "a"', "mine.toml: host a cannot be at more than one site: east, west"),
    ('name = "c"', 'name = "c"\nnodes = 1\nsite = "south"\n[[hosts]]\nname = "d"',
     "mine.toml: there is no link between sites east and south; there is no link between sites south and west"),
])
def test_wrong_sites_are_told_where_and_what_was_expected(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(written(tmp_path, TWO_SITES.replace(old, new, 1)))
    assert said in str(caught.value)


@pytest.mark.parametrize(("old", "new", "said"), [
    ('forward_s = "1ms"', "forward_s = -1", "line 5: layers 1: forward_s: a duration cannot be negative: -1"),
    ('forward_s = "1ms"\n', "", "layers 1: forward_s is missing"),
    ("count = 2", "counts = 2", "layers 2: unknown key 'counts'; did you mean count?"),
    ('ties = ["table"]', 'ties = ["tables"]', "tied: nothing is called tables, but layers name it in ties"),
    ('name = "table"', 'name = "tabel"', "tied 1: name: no layer has ties = ['tabel']; did you mean table?"),
    ("micro_batches = 4", "micro_batches = 0", "mine.toml, line 2: micro_batches must be a whole number from 1, got 0"),
    ('name = "head"', 'name = "embed"', "line 18: layers 3: name must be another than before: two layers are called embed"),
    ("count = 2", "count = 20_000", "line 11: layers 2: count would make more than 10,000 layers, got 20000"),
    ('forward_s = "1ms"', f"forward_s = {'9' * 400}", "line 5: layers 1: forward_s: a duration cannot be of more than 308"),
    ('forward_s = "1ms"', 'forward_s = ["1ms"]', "line 5: layers 1: forward_s: not a duration: ['1ms']"),
    ('ties = ["table"]', "ties = 3", "layers 1: ties must be a list of names, got 3"),
])
def test_a_wrong_workload_is_told_where_and_what_was_expected(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(written(tmp_path, WORKLOAD.replace(old, new, 1)))
    assert said in str(caught.value)


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no cluster 'cluster-9': no such file, and shipped are .*did you mean cluster-8\?"):
        load_cluster("cluster-9")


@pytest.mark.parametrize("name", [name for name in names("workload") if name != "workload-tiny-gpt"])
def test_figures_of_computed_workloads_follow_from_what_their_heads_say(name: str) -> None:
    head = (Path(catalog.__file__).parent / f"{name}.toml").read_text()
    said = re.search(r"blocks of width ([\d,]+),.*context ([\d,]+)[;,] ([\d,]+) sequences? a micro-batch", head)
    assert said is not None
    width, context, sequences = (int(figure.replace(",", "")) for figure in said.groups())
    tokens = context * sequences
    found = load_workload(name)
    (block, unit), *_ = (
        (layer, found.units[UnitName(layer.name)]) for layer in found.layers if layer.name.startswith("block")
    )
    parameters = unit.parameter_bytes / (4 if "124m" in name else 2)
    per_s = 125e12
    matrices_s, attention_s = 2 * parameters * tokens / per_s, 4 * context * width * tokens / per_s
    assert block.forward_s == pytest.approx(matrices_s + attention_s, rel=0.01)
    assert block.backward_input_s == pytest.approx(matrices_s + 2 * attention_s, rel=0.01)
    assert block.backward_weight_s == pytest.approx(matrices_s, rel=0.01)
    assert block.optimizer_s == pytest.approx(28 * parameters / 1.5e12, rel=0.03)
    assert (block.output_bytes, block.activation_bytes) == (2 * tokens * width, 34 * tokens * width)


def test_the_cluster_that_the_documentation_shows_can_be_read(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs" / "planner.md"
    (block,) = re.findall(r"```toml\n(.*?)```", docs.read_text(), re.DOTALL)
    found = load_cluster(written(tmp_path, block))
    assert {site: len(nodes) for site, nodes in found.sites().items()} == {"east": 32, "west": 32}
    assert len(found.hosts()[HostId("b1")]) == 8
