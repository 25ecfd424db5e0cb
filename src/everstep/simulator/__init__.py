"""A pretend world under the real protocol: time, network, nodes, store and faults, all from one seed."""
