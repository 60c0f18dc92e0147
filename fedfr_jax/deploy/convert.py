"""Weights of elsewhere as a file with our names."""

import os
from collections.abc import Mapping, Sequence

from fedfr_jax.deploy.export import export
from fedfr_jax.deploy.network import network_from
from fedfr_jax.models.weights import read_weights


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    model: Mapping | None = None,
    image_shape: Sequence[int] | None = None,
    key: str = "",
) -> str:
    """Write `source` as `target`, of any suffix of `export`; returns a line about it.

    Args:
      model: {"name": of MODELS, settings}; None finds it from names and shapes.
      image_shape: (H, W, C), likewise.
      key: which weights of a file that has several, see `read_weights`.

    Raises:
      ValueError: for weights of an unknown network, or that do not fit: says which
        leaf.
    """
    network = network_from(read_weights(source, key), source, model, image_shape)
    says = export(network, target)
    section = {k: v for k, v in network.model.items() if k != "num_classes"}
    shape = network.image_shape
    return f"{target}: {says}, images {shape}, config.model = {section}"
