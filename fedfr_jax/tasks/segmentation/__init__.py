"""Semantic segmentation by any federated algorithm."""

from fedfr_jax.tasks.segmentation.stages import segmentation

__all__ = ["segmentation"]
