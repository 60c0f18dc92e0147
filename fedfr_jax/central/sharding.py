"""Sharding of parameters, gradients and optimizer state; groups of batch statistics.

Batch statistics are of each device alone by default: Ioffe and Szegedy 2015,
arXiv:1502.03167, on a part of the batch (Goyal et al. 2017, arXiv:1706.02677, section
2.3).

Leaves are sharded by ordered pairs (pattern of paths, rule): the first pattern that
matches a leaf's path decides, and a leaf without one is replicated. ZeRO: Rajbhandari
et al. 2020, arXiv:1910.02054, section 5; stage 3 equals FSDP.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.scanned_blocks import StackedPath, are_stacked
from fedfr_jax.types import PyTree


def group_size(sync_batch_norm: bool | int, num_devices: int) -> int:
    """Number of devices that share batch statistics: 1 for False, all for True."""
    if isinstance(sync_batch_norm, bool):
        return num_devices if sync_batch_norm else 1
    if num_devices % sync_batch_norm:
        raise ValueError(
            f"sync_batch_norm must be False, True or a divisor of the {num_devices} "
            f"devices, got {sync_batch_norm}."
        )
    return sync_batch_norm


def group_mean(size: int, num_devices: int) -> Callable:
    """Mean over groups of `size` neighboring devices, within a shard_map."""
    numbers = range(0, num_devices, size)
    groups = [list(range(i, i + size)) for i in numbers] if size < num_devices else None
    return lambda x: jax.lax.psum(x, meshes.CLIENTS, axis_index_groups=groups) / size


# Sharded are: nothing; the optimizer's state; gradients too; parameters too, which are
# gathered where the loss is computed, block by block.
Rule = Literal["whole", "zero1", "zero2", "zero3"]
CLASSES = "classes"  # rows of a table of classes: cut everywhere, gathered nowhere
SMALLEST = 2**12  # elements; cutting a smaller leaf costs more than it frees


class StepSharding(NamedTuple):
    """How a step is sharded over the mesh."""

    rules: tuple[tuple[str, str], ...] = ()  # pairs, see above
    micro_batches: int = 1  # parts of a device's batch, one after another
    reduce_dtype: str | None = None  # gradients are summed over devices in; None: own
    # Parameters with the rules zero2 and zero3 are gathered in; None: own. Those with
    # zero2 are then stored sharded, as the gathered copy is not what is updated.
    gather_dtype: str | None = None
    num_classes: int = 0  # of the table with the rule CLASSES, without its padding
    class_rate: float = 1.0  # share of the classes whose rows take part


class LeafSharding(NamedTuple):
    """Sharding rule and axis of each leaf of the parameters."""

    rule: PyTree  # of str
    cut: PyTree  # of P: where the rule cuts the leaf, P() for one that cannot be cut
    stored: tuple[str, ...]  # rules whose leaves are sharded between steps

    @property
    def is_table(self) -> PyTree:
        """Mask of the leaves that are class matrices."""
        return jax.tree.map(lambda rule: rule == CLASSES, self.rule)

    def specs(self, rules: Sequence[str]) -> PyTree:
        """PartitionSpecs: sharded for leaves with one of `rules`, else replicated."""
        return jax.tree.map(
            lambda rule, cut: cut if rule in rules else P(), self.rule, self.cut
        )

    @property
    def is_whole(self) -> bool:
        """Whether no leaf is sharded."""
        return all(rule == "whole" for rule in jax.tree.leaves(self.rule))

    @property
    def params(self) -> PyTree:
        """PartitionSpecs of the parameters between steps."""
        return self.specs(self.stored)

    @property
    def grads(self) -> PyTree:
        """PartitionSpecs of the summed gradients."""
        return self.specs(("zero2", "zero3", CLASSES))

    @property
    def moments(self) -> PyTree:
        """PartitionSpecs of the optimizer's moments and the updates."""
        return self.specs(("zero1", "zero2", "zero3", CLASSES))


def leaf_sharding(
    step_sharding: StepSharding, params: PyTree, mesh: Mesh
) -> LeafSharding:
    """Apply the rules to parameters (arrays or ShapeDtypeStructs)."""
    rules = step_sharding.rules
    masks = [trees.matching(pattern)(params) for pattern, _ in rules]
    names = [rule for _, rule in rules]

    def first_rule(_, *is_match):
        matches = zip(names, is_match, strict=True)
        return next((rule for rule, is_found in matches if is_found), "whole")

    def spec(rule, x, is_stacked):
        return _shard_spec(mesh, rule, x, is_stacked)

    rule = jax.tree.map(first_rule, params, *masks)
    cut = jax.tree.map(spec, rule, params, are_stacked(params))
    is_copied = step_sharding.gather_dtype is not None
    return LeafSharding(rule, cut, ("zero2",) * is_copied + ("zero3", CLASSES))


def _shard_spec(mesh, rule, x, is_stacked):
    num_devices = mesh.shape[meshes.CLIENTS]
    if rule == CLASSES:
        return P(meshes.CLIENTS)
    if rule == "whole":
        return P()
    shape = x.shape[1:] if is_stacked else x.shape  # every block is cut alike
    spec = meshes.longest_sharded_axis(shape, meshes.CLIENTS, num_devices, SMALLEST)
    return P(None, *spec) if is_stacked and spec else spec


def state_layout(
    optimizer: optax.GradientTransformation,
    opt_state: PyTree,
    like: PyTree,
    other: Any,
) -> PyTree:
    """Tree like `opt_state`: `like` at the moments of parameters, `other` elsewhere."""
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, x: x,
        opt_state,
        like,
        transform_non_params=lambda _: other,
    )


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Build NamedShardings from PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def constrain(mesh: Mesh, tree: PyTree, specs: PyTree) -> PyTree:
    """Constrain every leaf of `tree` to its PartitionSpec, within jit."""
    return jax.tree.map(
        lambda x, spec: with_sharding_constraint(x, NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def gather_copies(params: PyTree, layout: LeafSharding, dtype: str | None) -> PyTree:
    """All-gather the leaves with rule zero2 in `dtype`, on one device of a shard_map.

    None: they are whole already, and nothing is gathered.
    """
    if dtype is None:
        return params

    def gather_leaf(x, rule, cut):
        axis = _axis(cut)
        if rule != "zero2" or axis is None:
            return x
        return _all_gather(x, axis, dtype)

    return jax.tree.map(gather_leaf, params, layout.rule, layout.cut)


def unshard(
    params: PyTree, layout: LeafSharding, step_sharding: StepSharding
) -> PyTree:
    """Parameters as the network reads them, on one device of a shard_map.

    Leaves with rule zero3 are all-gathered, and the gradient of a gathered leaf is
    summed over the devices and sharded. Copies of `gather_copies` get the dtype of
    sums. Stacked leaves of both become a `StackedPath`, so that the network makes one
    block at a time.
    """
    gather_dtype, reduce_dtype = step_sharding.gather_dtype, step_sharding.reduce_dtype

    def unshard_leaf(x, rule, cut, is_stacked):
        axis = _axis(cut)
        if axis is not None and rule == "zero3":
            select = _gather(axis - is_stacked, gather_dtype, reduce_dtype)
        elif axis is not None and rule == "zero2" and gather_dtype is not None:
            select = _widen
        else:
            return x
        return StackedPath(x, select) if is_stacked else select(x)

    return jax.tree.map(
        unshard_leaf, params, layout.rule, layout.cut, are_stacked(params)
    )


def _widen(x):
    return x.astype(trees.sum_dtype(x.dtype))


def reduce_gradients(
    mesh: Mesh, grads: PyTree, layout: LeafSharding, dtype: str | None
) -> PyTree:
    """Sum a device's gradients over the devices, sharded as `LeafSharding.grads`."""
    leaves, structure = jax.tree.flatten(grads)
    kinds = [x if dtype is None else x.astype(dtype) for x in leaves]
    rules, cuts = map(structure.flatten_up_to, (layout.rule, layout.cut))
    reduced, plain = list(leaves), []
    for i, (rule, axis) in enumerate(zip(rules, map(_axis, cuts), strict=True)):
        if rule == "zero2" and axis is not None:
            reduced[i] = _scatter(kinds[i], axis).astype(leaves[i].dtype)
        elif rule != CLASSES and (rule != "zero3" or axis is None):
            plain.append(i)  # other gradients were summed in the backward pass
    sums = meshes.sum_over_clients(mesh, [kinds[i] for i in plain])  # in one go
    for i, x in zip(plain, sums, strict=True):
        reduced[i] = x.astype(leaves[i].dtype)
    return structure.unflatten(reduced)


def _axis(spec) -> int | None:
    return next((i for i, name in enumerate(spec) if name), None)


def _scatter(x, axis):
    """Reduce-scatter along an axis."""
    return jax.lax.psum_scatter(x, meshes.CLIENTS, scatter_dimension=axis, tiled=True)


def _all_gather(x, axis, dtype):
    """All-gather along an axis in `dtype` (None: its own)."""
    narrow = x if dtype is None else x.astype(dtype)
    return jax.lax.all_gather(narrow, meshes.CLIENTS, axis=axis, tiled=True)


@functools.cache  # so that every trace has the same function
def _gather(axis: int, gather_dtype: str | None, reduce_dtype: str | None) -> Callable:
    """All-gather of a leaf; it and the sum of its gradient in dtypes (None: own)."""

    @jax.custom_vjp
    def gather(x):
        return _all_gather(x, axis, gather_dtype).astype(x.dtype)

    def backward(_, dy):
        narrow = dy if reduce_dtype is None else dy.astype(reduce_dtype)
        return (_scatter(narrow, axis).astype(dy.dtype),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather
