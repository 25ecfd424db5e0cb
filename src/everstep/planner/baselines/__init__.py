"""Published systems as pure functions: how each would have recovered, so that it can be compared with."""
