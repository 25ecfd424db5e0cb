"""What runs on whom. Pure functions over the nouns: no torch, no clock, no chance."""
