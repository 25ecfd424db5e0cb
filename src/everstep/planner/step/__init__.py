"""What a step of a plan takes: the order of actions, seconds, bytes, and what is learnt from measuring them."""
