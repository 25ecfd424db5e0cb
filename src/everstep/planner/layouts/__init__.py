"""Which pipelines to build from n nodes, and who takes which place in them."""
