"""Data: sources, partitions, augmentations, batching."""
