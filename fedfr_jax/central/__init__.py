"""One network on the whole mesh, without clients."""
