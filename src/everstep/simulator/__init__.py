"""Pretend time, network and faults under the same protocol and planner. Needs no torch."""
