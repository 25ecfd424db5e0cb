"""Torch: builds what a node holds and carries out a schedule. Chooses nothing."""
