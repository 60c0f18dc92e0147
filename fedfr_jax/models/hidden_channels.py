"""Which axes of a network's leaves have its hidden channels."""

import math
import re
from collections.abc import Mapping

import jax

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.types import Model, input_structs


def hidden_axes(model: Model) -> dict[str, dict[int, int]]:
    """{path of a leaf: {axis: channels}}, of the axes of hidden channels.

    An axis longer than its channels has pixels of them, channels fastest.

    Raises:
      ValueError: for a network of other layers than dense ones, convolutions and batch
        norms.
    """
    if isinstance(model.input_shape, Mapping):
        raise ValueError(
            f"the network of widths must have one input, got {[*model.input_shape]}."
        )
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    blocks = jax.eval_shape(scanned_blocks.by_block_name, shapes)
    params, stats = (trees.by_name(blocks[x]) for x in ("params", "batch_stats"))
    _check_layers(model, params, stats)
    image = input_structs(model.input_shape)
    program = str(jax.make_jaxpr(model.output)(shapes, image))
    if re.search(r"feature_group_count=(?!1\b)", program):
        raise ValueError(
            "the network of widths must have convolutions in one group of channels, "
            "got others. Choose another config.model.name."
        )
    block = {name: _block_of(model, name) for name in (*params, *stats)}
    kernels = {name: x.shape for name, x in params.items() if x.ndim > 1}
    places = sorted({block[name] for name in kernels})
    first, last = places[0], places[-1]
    widths = {i: [x[-1] for k, x in kernels.items() if block[k] == i] for i in places}
    before = dict(zip(places[1:], (widths[i] for i in places), strict=False))
    data = {model.input_shape[-1], math.prod(model.input_shape)}
    axes: dict[str, dict[int, int]] = {}
    for name, x in {**params, **stats}.items():
        place = block[name]
        axes[name] = {-1: x.shape[-1]} if place < last else {}
        if name in kernels and (place > first or x.shape[-2] not in data):
            size = x.shape[-2]
            known = [size, *before.get(place, ())] if x.ndim > 2 else before[place]
            alike = [c for c in known if size % c == 0]
            axes[name][-2] = size if size in known else max(alike)
    return axes


def _block_of(model: Model, name: str) -> int:
    """Number of the block of a leaf, in the order of the data."""
    return next(i for i, x in enumerate(model.blocks) if name.startswith(f"{x}/"))


def _check_layers(model: Model, params: dict, stats: dict) -> None:
    """Raise ValueError for layers whose channels are not alone."""
    normed = {name.rpartition("/")[0] for name in stats}
    for name, x in params.items():
        layer, _, leaf = name.rpartition("/")
        is_known = leaf == "kernel" if x.ndim > 1 else leaf != "scale"
        has_block = any(name.startswith(f"{block}/") for block in model.blocks)
        if not has_block or not (is_known or layer in normed):
            raise ValueError(
                "the network of widths must have dense layers, convolutions and batch "
                f"norms alone, got {name}. Choose another config.model.name."
            )
