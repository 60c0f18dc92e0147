"""Central training: one model on the whole mesh, without clients."""
