"""Real processes, sockets, clock and disk under the protocol and the engine."""
