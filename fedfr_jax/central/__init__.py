"""Central training: one model over the whole mesh, without clients."""
