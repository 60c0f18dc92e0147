"""Semantic segmentation: a class for every pixel, by any algorithm."""

from fedfr_jax.tasks.segmentation.stages import segmentation

__all__ = ["segmentation"]
