"""The cost model a second time, written another way: a step played event by event, node by node and message by message.

It shares with the planner the nouns, the order of actions and the order of groups, and nothing else: no tables of shapes, no
closed forms, no sums over alike nodes. Bytes between sites are counted as they are sent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from everstep.cluster import Cluster, Link
from everstep.plan import Plan
from everstep.planner.step.rounds import in_rounds
from everstep.quantities import NodeId, SiteId, node_number
from everstep.schedule import Action, Kind, Schedule
from everstep.workload import Workload

Sites = tuple[SiteId, SiteId]


class Step:
    """One step of a plan. ``overlap``: units are reduced one by one as soon as they are whole."""

    def __init__(self, plan: Plan, workload: Workload, cluster: Cluster, schedule: Schedule, *, overlap: bool = False) -> None:
        self.plan, self.workload, self.cluster, self.overlap = plan, workload, cluster, overlap
        self.now_s = 0.0
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []
        self.count = 0
        self.todo = {node: [a for a in schedule[node] if a.kind is not Kind.REDUCE] for node in plan.nodes}
        self.busy = dict.fromkeys(plan.nodes, False)
        self.here: set[tuple[NodeId, str, int, int]] = set()
        """What a node has: activations and gradients, by the hop that they are for."""
        self.held_bytes = {node: self._state(node) for node in plan.nodes}
        self.peak_bytes = dict(self.held_bytes)
        self.message_ends: Counter[NodeId] = Counter()
        self.summed_bytes: Counter[NodeId] = Counter()
        self.shadowing_s = self._shadowing()
        self.updated_s = dict.fromkeys(plan.nodes, 0.0)
        self.sent_bytes: Counter[Sites] = Counter()
        self.line_free_s: dict[frozenset[SiteId], float] = {}
        self.groups = self._groups_of_units() if overlap else self._groups()
        self.waiting_for = {node: [g for g in self.groups if node in g[0]] for node in plan.nodes}
        self.reducing: set[NodeId] = set()
        self.adds_left = self._adds()
        self.whole_s: dict[int, float] = {}

    def seconds(self) -> float:
        for node in self.plan.nodes:
            self._go_on(node)
        self._reduce_soon()
        while self.events:
            self.now_s, _, _, happen = heapq.heappop(self.events)
            happen()
        assert not any(self.todo.values()) and not any(self.waiting_for.values()), "the step never ends"
        floors = [self._host_floor(host) for host in self.cluster.host_cores]
        for (here, there), num_bytes in self.sent_bytes.items():
            rate = next(link for pair, link in self.cluster.site_links.items() if set(pair) == {here, there}).bytes_per_s
            floors.append(num_bytes / rate)
        return max(*self.updated_s.values(), *floors) + self.workload.fixed_s

    # Work

    def _at(self, seconds: float, happen: Callable[[], None], late: bool = False) -> None:
        """``late``: after everything else that happens at that moment."""
        self.count += 1
        heapq.heappush(self.events, (self.now_s + seconds, int(late), self.count, happen))

    def _reduce_soon(self) -> None:
        self._at(0.0, self._reduce, late=True)

    def _go_on(self, node: NodeId) -> None:
        if self.busy[node]:
            return
        if not self.todo[node]:
            self._reduce_soon()
            self._update(node)
            return
        action = self.todo[node][0]
        route = self.plan.routes[action.micro_batch]
        wanted = [("F", action.hop)] if action.kind is Kind.FORWARD and action.hop else []
        if action.kind is Kind.BACKWARD and action.hop + 1 < len(route):
            wanted = [("B", action.hop)]
        if any((node, kind, action.micro_batch, hop) not in self.here for kind, hop in wanted):
            return
        self.todo[node].pop(0)
        self.busy[node] = True
        if action.kind is Kind.FORWARD:
            self.held_bytes[node] += self._activations(action)
            self.peak_bytes[node] = max(self.peak_bytes[node], self.held_bytes[node])
        self._at(self._work_s(node, action), lambda: self._done(node, action))

    def _shadowing(self) -> dict[NodeId, float]:
        """How much longer each own forward takes for those that a node computes a second time."""
        hops = [hop for route in self.plan.routes for hop in route]
        own = Counter(hop.node for hop in hops)
        extra_s = dict.fromkeys(own, 0.0)
        for hop in hops:
            if hop.shadow is not None and own[hop.shadow]:
                seconds = sum(self.workload.layers[layer].forward_s for layer in hop.layers)
                extra_s[hop.shadow] += seconds / own[hop.shadow]
        return extra_s

    def _work_s(self, node: NodeId, action: Action) -> float:
        seconds = self.shadowing_s[node] if action.kind is Kind.FORWARD else 0.0
        for index in self.plan.routes[action.micro_batch][action.hop].layers:
            layer = self.workload.layers[index]
            if action.kind is Kind.FORWARD:
                seconds += layer.forward_s
            elif action.kind is Kind.WEIGHT:
                seconds += layer.backward_weight_s
            else:
                seconds += layer.backward_input_s + (0.0 if self.plan.order.split else layer.backward_weight_s)
        return seconds / self.cluster.nodes[node].speed

    def _done(self, node: NodeId, action: Action) -> None:
        self.busy[node] = False
        route = self.plan.routes[action.micro_batch]
        if action.kind is Kind.FORWARD and action.hop + 1 < len(route):
            self.message_ends.update((node, route[action.hop + 1].node))
            self._send(node, route[action.hop + 1].node, "F", action.micro_batch, action.hop + 1, route[action.hop].end - 1)
        if action.kind is Kind.BACKWARD and action.hop:
            self._send(node, route[action.hop - 1].node, "B", action.micro_batch, action.hop - 1, route[action.hop].first - 1)
        if action.kind is (Kind.WEIGHT if self.plan.order.split else Kind.BACKWARD):
            self.held_bytes[node] -= self._activations(action)
            for layer in route[action.hop].layers:
                self._added(layer)
        self._go_on(node)

    def _state(self, node: NodeId) -> int:
        held = set(self.plan.placement[node])
        units = [unit for unit in self.workload.units.values() if held & set(unit.layers)]
        return sum(unit.state_bytes + unit.gradient_bytes for unit in units)

    def _activations(self, action: Action) -> int:
        layers = self.plan.routes[action.micro_batch][action.hop].layers
        return sum(self.workload.layers[layer].activation_bytes for layer in layers)

    def _send(self, source: NodeId, target: NodeId, kind: str, micro_batch: int, hop: int, boundary: int) -> None:
        num_bytes = self.workload.layers[boundary].output_bytes
        link = self._link(source, target)
        self._count_sent(source, target, num_bytes)

        def arrive() -> None:
            self.here.add((target, kind, micro_batch, hop))
            self._go_on(target)

        self._at(link.alpha_s + num_bytes / link.bytes_per_s, arrive)

    def _link(self, one: NodeId, other: NodeId) -> Link:
        here, there = self.cluster.nodes[one], self.cluster.nodes[other]
        for pair, link in self.cluster.site_links.items():
            if {here.site, there.site} == set(pair):
                return link
        same_host = here.host == there.host
        return self.cluster.host_link if same_host and self.cluster.host_link else self.cluster.link

    def _count_sent(self, source: NodeId, target: NodeId, num_bytes: float) -> None:
        way = (self.cluster.nodes[source].site, self.cluster.nodes[target].site)
        if way[0] != way[1]:
            self.sent_bytes[way] += num_bytes  # type: ignore[assignment]

    # Reductions: a group is its members, its bytes, and its number

    def _holders(self, layers: tuple[int, ...]) -> tuple[NodeId, ...]:
        found = [node for node, held in self.plan.placement.items() if set(held) & set(layers)]
        return tuple(sorted(found, key=node_number))

    def _groups(self) -> list[tuple[tuple[NodeId, ...], float, int]]:
        groups: Counter[tuple[NodeId, ...]] = Counter()
        for unit in self.workload.units.values():
            groups[self._holders(unit.layers)] += unit.gradient_bytes or unit.parameter_bytes
        many = {members: num_bytes for members, num_bytes in groups.items() if len(members) > 1}
        return [(members, many[members], number) for number, members in enumerate(in_rounds(many))]

    def _groups_of_units(self) -> list[tuple[tuple[NodeId, ...], float, int]]:
        found = []
        for number, unit in enumerate(self.workload.units.values()):
            members = self._holders(unit.layers)
            if len(members) > 1:
                found.append((members, float(unit.gradient_bytes or unit.parameter_bytes), number))
        return found

    def _adds(self) -> dict[int, int]:
        """By group, how many micro-batches have still to be added to it, layer by layer."""
        if not self.overlap:
            return {}
        units = list(self.workload.units.values())
        return {number: len(self.plan.routes) * len(units[number].layers) for _, _, number in self.groups}

    def _added(self, layer: int) -> None:
        for number, unit in enumerate(self.workload.units.values()):
            if number in self.adds_left and layer in unit.layers:
                self.adds_left[number] -= 1
                if not self.adds_left[number]:
                    self.whole_s[number] = self.now_s
                    self._reduce_soon()

    def _reduce(self) -> None:
        """Begin whatever can begin."""
        for group in self._startable():
            members, num_bytes, _ = group
            self.reducing.update(members)
            for node in members:
                self.waiting_for[node].remove(group)
            self._at(self._reduce_s(members, num_bytes), lambda members=members: self._reduced(members))  # type: ignore[misc]

    def _startable(self) -> list[tuple[tuple[NodeId, ...], float, int]]:
        pending = list(dict.fromkeys(group for mine in self.waiting_for.values() for group in mine))
        taken = set(self.reducing)
        found = []
        if self.overlap:
            whole = [group for group in pending if group[2] in self.whole_s]
            for group in sorted(whole, key=lambda group: (self.whole_s[group[2]], group[2])):
                if not taken.intersection(group[0]):
                    found.append(group)
                taken.update(group[0])  # also where it has to wait: later ones do not overtake it
            return found
        for group in sorted(pending, key=lambda group: group[2]):
            free = all(not self.busy[n] and not self.todo[n] and n not in taken for n in group[0])
            if free and all(self.waiting_for[node][0] == group for node in group[0]):
                found.append(group)
                taken.update(group[0])
        return found

    def _reduce_s(self, members: tuple[NodeId, ...], num_bytes: float) -> float:
        """Every member sends every other its part, then its sum of its own part."""
        part = num_bytes / len(members)
        own_s, lines = 0.0, Counter[frozenset[SiteId]]()
        for member in members:
            self.summed_bytes[member] += part * (len(members) - 1)  # type: ignore[assignment]
        for source in members:
            for target in members:
                if source == target:
                    continue
                link = self._link(source, target)
                own_s = max(own_s, 2 * (len(members) - 1) * part / link.bytes_per_s + 2 * link.alpha_s)
                self._count_sent(source, target, 2 * part)
                here, there = self.cluster.nodes[source].site, self.cluster.nodes[target].site
                if here < there:
                    lines[frozenset((here, there))] += 2 * part  # type: ignore[assignment]
        end_s = self.now_s + own_s
        for line, crossing in lines.items():
            link = next(link for pair, link in self.cluster.site_links.items() if set(pair) == set(line))
            self.line_free_s[line] = max(self.line_free_s.get(line, 0.0), self.now_s) + crossing / link.bytes_per_s
            end_s = max(end_s, self.line_free_s[line] + 2 * link.alpha_s)
        return end_s - self.now_s

    def _reduced(self, members: tuple[NodeId, ...]) -> None:
        self.reducing.difference_update(members)
        self._reduce_soon()
        for node in members:
            self._update(node)

    def _update(self, node: NodeId) -> None:
        if self.todo[node] or self.busy[node] or self.waiting_for[node] or node in self.reducing:
            return
        seconds = sum(self.workload.layers[layer].optimizer_s for layer in self.plan.placement[node])
        self.updated_s[node] = self.now_s + seconds / self.cluster.nodes[node].speed

    def _host_floor(self, host: object) -> float:
        cores = next(cores for name, cores in self.cluster.host_cores.items() if name == host)
        if cores is None:
            return 0.0
        work_s = 0.0
        for node, facts in self.cluster.nodes.items():
            if facts.host == host and node in self.plan.placement:
                for route in self.plan.routes:
                    for hop in route:
                        if hop.node == node:
                            work_s += sum(self.workload.layers[layer].total_s for layer in hop.layers) / facts.speed
                            work_s += self.shadowing_s[node] / facts.speed
                work_s += sum(self.workload.layers[layer].optimizer_s for layer in self.plan.placement[node]) / facts.speed
                beside = self.workload.beside
                chores_s = beside.node_s + beside.message_s * self.message_ends[node]
                work_s += (chores_s + beside.summed_byte_s * self.summed_bytes[node]) / facts.speed
        return work_s / cores
