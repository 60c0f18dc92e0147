"""Image classification by any federated algorithm."""

from fedfr_jax.tasks.classification.stages import classification

__all__ = ["classification"]
