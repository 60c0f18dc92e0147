"""Tasks: a data set, a model, a loss and its evaluators, put together."""
