"""Image classification: any algorithm, and leaves that stay with the clients."""

from fedfr_jax.tasks.classification.stages import classification

__all__ = ["classification"]
