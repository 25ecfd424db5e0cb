"""Recovery policies against traces, on pretend time and at the level of the model: what each would have been worth."""
