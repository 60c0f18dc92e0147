"""Clients of different strength: parts of one network, and adapters of any rank.

A client trains the first channels, or ranks, of every layer. The others are 0 in what
it receives, where they get no gradient: one compiled program has clients of any size.
An entry's change is averaged over the clients that have it.

HeteroFL: Diao et al. 2021, arXiv:2010.01264, without its scaler. HetLoRA: Cho et al.
2024, arXiv:2401.06432, whose ranks are fixed here. Products: FlexLoRA, Bai et al. 2024,
arXiv:2402.11505.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.contract import aggregator_of, update_like
from fedfr_jax.federated.aggregation.mean import to_float32
from fedfr_jax.models.hidden_channels import hidden_axes
from fedfr_jax.types import LAST, MEAN, Algorithm, Model, PyTree

LORA_AXES = {"lora_a": -1, "lora_b": -2}  # of the ranks
PRODUCT = "lora_product"


class Levels(NamedTuple):
    """The sizes that clients may have, and each client's."""

    values: tuple[float, ...]  # [L] ascending
    of_client: Callable[[jax.Array], jax.Array]  # id [] -> [] int32 in [0, L)
    built_for: tuple[tuple[str, int], ...] = ()  # as of an Algorithm


# Entries of a leaf that the clients of a level have: (name, leaf, level [] int32) ->
# bool, which broadcasts to the leaf; None for all.
Cut = Callable[[str, Any, Any], jax.Array | None]


def with_ranks(algorithm: Algorithm, ranks: Any) -> Algorithm:
    """Give each client a rank of its own for a model's LoRA adapters.

    Args:
      algorithm: whose updates are averaged by weights.
      ranks: of every client, int [N]; or pairs (share of the clients, rank), by which
        each client draws its own. Ranks above the adapter's are the adapter's.
    """
    levels = _levels("ranks", ranks, int)
    table = np.array(levels.values, np.int32)

    def cut(name, leaf, level):
        axis = LORA_AXES.get(name.rpartition("/")[2])
        if axis is None:
            return None
        return _first(leaf, axis, jnp.asarray(table)[level])

    def init(variables):
        names = trees.by_name(variables["params"])
        a, b = ({x[:-7] for x in names if x.endswith(key)} for key in LORA_AXES)
        if b - a:
            raise ValueError(
                "ranks must be of adapters whose A and B are trained, got frozen A in "
                f"{min(b - a)}. Set train_a=True."
            )
        if not a:
            raise ValueError(
                "ranks must be of a model with the adapter lora, "
                f"got {[*names][:4]}. Use ff.with_adapter."
            )
        return algorithm.init(variables)

    return _with_cut(algorithm._replace(init=init), levels, cut)


def with_widths(algorithm: Algorithm, model: Model, shares: Any) -> Algorithm:
    """Give each client the first channels of every hidden layer of a network.

    Inputs and outputs of the network stay whole. Activations must be 0 at 0.

    Args:
      algorithm: whose updates are averaged by weights.
      model: that it trains.
      shares: of the channels, in (0, 1], of every client [N]; or pairs (share of the
        clients, share of the channels), by which each client draws its own.

    Raises:
      ValueError: for a network whose norms mix channels or whose convolutions have
        groups of them, or shares out of range.
    """
    levels = _levels("widths", shares, float)
    if levels.values[-1] > 1:
        raise ValueError(f"shares must be in (0, 1], got {levels.values[-1]}.")
    axes = hidden_axes(model)

    def cut(name, leaf, level):
        mask = None
        for axis, channels in axes.get(_layer_of(name), {}).items():
            sizes = [math.ceil(round(x * channels, 6)) for x in levels.values]
            size = jnp.asarray(sizes, jnp.int32)[level]
            one = _first(leaf, axis, size, channels)
            mask = one if mask is None else mask & one
        return mask

    return _with_cut(algorithm, levels, cut)


def _first(leaf, axis: int, size: jax.Array, channels: int | None = None) -> jax.Array:
    """Mask of the first `size` of `channels` along an axis, whose fastest they are."""
    length = leaf.shape[axis]
    shape = [1] * leaf.ndim
    shape[axis] = length
    place = jnp.arange(length, dtype=jnp.int32) % (channels or length)
    return (place < size).reshape(shape)


def _levels(key: str, values: Any, kind: type) -> Levels:
    """Read the sizes of all clients."""
    try:
        table = np.asarray(values, float)
    except ValueError:  # numbers and pairs
        table = np.zeros(0)
    if table.size == 0 or table.ndim not in (1, 2) or table.shape[1:] not in ((), (2,)):
        raise ValueError(
            f"{key} must be a number for each client or pairs (share of the clients, "
            f"number), got {values!r}."
        )
    sizes = table if table.ndim == 1 else table[:, 1]
    if not (sizes > 0).all() or (sizes.astype(kind) != sizes).any():
        raise ValueError(f"{key} must be positive {kind.__name__}s, got {values!r}.")
    known, index = np.unique(sizes.astype(kind), return_inverse=True)
    if table.ndim == 1:
        by_id = index.astype(np.int32)
        of_client = lambda client: jnp.asarray(by_id)[client]
        return Levels((*known.tolist(),), of_client, ((f"with_{key}", len(by_id)),))
    if not math.isclose(table[:, 0].sum(), 1, abs_tol=1e-6) or (table[:, 0] < 0).any():
        raise ValueError(f"{key} must have shares with sum 1, got {values!r}.")
    shares = np.bincount(index, table[:, 0], len(known))
    bounds = np.cumsum(shares)[:-1].astype(np.float32)

    def draw(client):
        place = jax.random.uniform(jax.random.fold_in(jax.random.key(0), client))
        return (place >= jnp.asarray(bounds)).sum(dtype=jnp.int32)

    return Levels((*known.tolist(),), draw)


def _with_cut(algorithm: Algorithm, levels: Levels, cut: Cut) -> Algorithm:
    """Let each client train a part of every model; see the module."""
    count = len(levels.values)
    aggregator = aggregator_of(algorithm, "the key ranks or widths")
    if aggregator.role != MEAN:
        raise ValueError(
            "ranks and widths need an algorithm that aggregates by a plain mean, got "
            f"{algorithm}. Put links of an aggregation around them; privacy cannot be."
        )

    def keep(tree, level):
        """Leaves of a level, 0 beyond."""

        def select(path, x):
            mask = cut(trees.path_name(path), x, level)
            return x if mask is None else jnp.where(mask, x, jnp.zeros_like(x))

        return jax.tree_util.tree_map_with_path(select, tree)

    def client_update(key, server, personal, client):
        level = levels.of_client(client.id)
        part = variable_split.in_models(server, lambda x: keep(x, level))
        output = algorithm.client_update(key, part, personal, client)
        if jnp.shape(output.weight) != ():
            raise ValueError(
                "the algorithm of ranks and widths must have one weight for each "
                f"client, got {algorithm}. Use fedavg."
            )
        is_level = jnp.arange(count, dtype=jnp.int32) == level
        weights = jnp.where(is_level, output.weight, jnp.zeros_like(output.weight))
        update = keep(output.update, level)
        return output._replace(update=update, sums=(output.sums, weights))

    def server_update(server, result):
        sums, weights = result.sums

        def among_those_who_have_it(path, x):
            masks = [cut(trees.path_name(path), x, jnp.int32(i)) for i in range(count)]
            masks = [mask for mask in masks if mask is not None]
            if not masks:
                return x
            found = sum(jnp.where(m, w, 0) for m, w in zip(masks, weights, strict=True))
            ratio = weights.sum() / jnp.where(found > 0, found, 1)
            return jnp.where(found > 0, x * ratio.astype(x.dtype), jnp.zeros_like(x))

        mean = jax.tree_util.tree_map_with_path
        aggregate = mean(among_those_who_have_it, result.aggregate)
        return algorithm.server_update(
            server, result._replace(aggregate=aggregate, sums=sums)
        )

    return algorithm._replace(
        client_update=client_update,
        server_update=server_update,
        # Of what replaces the mean, or of the noise of `private`, no share is right.
        aggregator=aggregator._replace(role=LAST),
        built_for=(*algorithm.built_for, *levels.built_for),
    )


def _layer_of(name: str) -> str:
    """Path of a leaf below its collection; of a stack, that of its first block."""
    *_, path = re.split(r"^(?:\w+/)?(?:params|batch_stats)/", name)
    return scanned_blocks.block_paths(path)[0]


def with_products(algorithm: Algorithm) -> Algorithm:
    """Average the products A B of LoRA adapters, not A and B.

    A client's update has the change of A B in their place, so that links see that of
    the kernel; the server splits the new product by a singular value decomposition, A
    orthonormal, and keeps the adapter's rank.

    Args:
      algorithm: whose update is a change of the model.
    """

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        start = variable_split.shared(algorithm.global_model(server))
        return output._replace(update=_on_pairs(_product_change, output.update, start))

    def server_update(server, result):
        start = variable_split.shared(algorithm.global_model(server))
        aggregate = _on_pairs(_pair_change, result.aggregate, start)
        return algorithm.server_update(server, result._replace(aggregate=aggregate))

    def products_like(server):
        like = update_like(algorithm, server)
        return _on_pairs(_product_change, like, like)

    return algorithm._replace(
        client_update=client_update,
        server_update=server_update,
        update_like=products_like,
    )


def _on_pairs(function: Callable, tree: PyTree, start: PyTree) -> PyTree:
    """Apply `function(leaves, leaves at the start)` to each layer with an adapter."""
    if not isinstance(tree, dict):
        return tree
    if start.get("lora_a") is not None and start.get("lora_b") is not None:
        return function(tree, start)
    return {k: _on_pairs(function, x, start[k]) for k, x in tree.items()}


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A B [*stack, I, O] of [*stack, ..., I, r] and [*stack, r, O], in float32."""
    a = to_float32(a).reshape(*b.shape[:-2], -1, a.shape[-1])
    return jnp.matmul(a, to_float32(b), precision="highest")


def _product_change(update: dict, start: dict) -> dict:
    """Leaves of an update with the change of A B for those of A and B."""
    update = dict(update)
    pair = [start[key] + update.pop(key) for key in ("lora_a", "lora_b")]
    return {
        **update,
        PRODUCT: _product(*pair) - _product(start["lora_a"], start["lora_b"]),
    }


def _pair_change(change: dict, start: dict) -> dict:
    """The inverse: that change of A and B whose product is nearest."""
    change, (a, b) = dict(change), (start["lora_a"], start["lora_b"])
    product = _product(a, b) + change.pop(PRODUCT)
    left, sizes, right = jnp.linalg.svd(product, full_matrices=False)
    rank = b.shape[-2]
    new_b = sizes[..., :rank, None] * right[..., :rank, :]
    new_a = left[..., :rank].reshape(a.shape)
    return {**change, "lora_a": new_a - a, "lora_b": new_b - b}
