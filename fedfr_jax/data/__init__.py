"""Data: sources, partitions, augmentations, batches."""
