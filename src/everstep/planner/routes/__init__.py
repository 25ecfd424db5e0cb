"""Which way micro-batches go when nodes hold more, or other things, than plain pipelines need."""
