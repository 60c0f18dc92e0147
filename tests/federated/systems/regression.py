"""Softmax regression of single clients in NumPy: what a client of `toys.LOCAL` does."""

import numpy as np

RATE = 0.1  # of `toys.RATE`


def examples(sizes, seed):
    """(images [T, 5], labels [T] of 3 classes, a model [18])."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(sum(sizes), 5)).astype(np.float32)
    labels = rng.integers(3, size=sum(sizes)).astype(np.int32)
    return images, labels, rng.normal(size=18).astype(np.float32)


def trained(w, x, y, steps):
    """A model [18] after `steps` full batches of x [n, 5] and y [n], in float64."""
    w = np.array(w, float)
    for _ in range(steps):
        logits = x @ w[:15].reshape(5, 3) + w[15:]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True) - np.eye(3)[y]
        w -= RATE * np.concatenate([(x.T @ p).reshape(-1), p.sum(axis=0)]) / len(x)
    return w
