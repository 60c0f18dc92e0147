"""Adapters: few numbers that are trained in the place of a network's own.

An adapter is put around a `Model`. Its numbers are leaves beside a layer's kernel, such
as `encoder/block1/qkv/{kernel, lora_a, lora_b}`, stacked with the block's: paths select
them, scans and lanes cut them like any leaf. A layer that has some computes with them
where the network is traced; all other leaves are frozen but those of a head.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.models.block_scan import Stage
from fedfr_jax.models.frozen import whole_variables, with_frozen
from fedfr_jax.models.linen import normal, uniform
from fedfr_jax.ranges import Pattern, Positive, Width
from fedfr_jax.schema import checked, register
from fedfr_jax.types import Model, PyTree, input_structs

LORA = "/lora_[ab]$"  # leaves of lora
Leaves = dict[tuple[str, ...], jax.Array]  # by their keys below params


def run_alone(run: Callable, module: nn.Module, *args) -> jax.Array:
    """A module's own computation, as `Adapter.call`."""
    del module
    return run(*args)


class Adapter(NamedTuple):
    """What is trained of a network beside its head."""

    moves: str  # pattern of the leaves, "" for none
    # (model, shapes of its params, pattern of the head) -> (key -> new leaves)
    plan: Callable[..., Callable[[jax.Array], Leaves]] | None = None
    # (run, module, *args) -> output of a module, whose own computation is `run`
    call: Callable[..., jax.Array] = run_alone
    # Leaves of a module -> those of a plain one; None: no plain network computes it
    merge: Callable[[dict], dict] | None = dict
    rank: int = 0  # of lora
    alpha: float = 0.0  # of lora
    draw: Callable[[jax.Array], Leaves] | None = None  # `plan` for a model


@checked
def lora(
    *,
    rank: Width = 8,
    alpha: Positive = 16.0,
    targets: Pattern = ".",
    train_a: bool = True,
) -> Adapter:
    """Low-rank changes of layers: x W + (x A) B alpha / rank.

    Hu et al. 2021, arXiv:2106.09685, section 4.1. A is drawn as PEFT does, B is 0. Of
    a convolution A has its window, B one pixel. Leaves: lora_a [..., I, rank], lora_b
    [rank, O].

    Args:
      rank: at most the smaller width of every layer.
      alpha: of the factor.
      targets: pattern over paths of kernels, dense or of convolutions in one group; the
        head is none of them.
      train_a: False keeps A as it was drawn, so that the mean of B is that of the
        products (FFA-LoRA, Sun et al. 2024, arXiv:2403.12313).
    """
    scale = alpha / rank

    def plan(model, params, head):
        del model
        layers = find_layers(params, targets, head)
        for layer in layers:
            if rank > (largest := min(layer.fan_in, layer.width)):
                raise ValueError(
                    f"adapter.rank must be at most {largest}, the smaller width of "
                    f"{layer.name}, got {rank}. Choose a smaller rank or other targets."
                )
        return lambda key: _draw(layers, key, pair)

    def pair(key, layer):
        shape, dtype = (*layer.kernel.shape[:-1], rank), layer.kernel.dtype
        up = jnp.zeros((*layer.stack, rank, layer.width), dtype)
        return {"lora_a": uniform(layer.fan_in**-0.5)(key, shape, dtype), "lora_b": up}

    def call(run, module, *args):
        if not _has_leaf(module, "lora_a"):
            return run(*args)
        a, b = (module.get_variable("params", x) for x in ("lora_a", "lora_b"))
        own = {"parent": None, "name": None, "use_bias": False}
        down: Any = module.clone(features=rank, **own)
        low = down.apply({"params": {"kernel": a}}, *args)
        change = jnp.matmul(low, b.astype(low.dtype), precision=module.precision)
        return run(*args) + change * scale

    def merge(leaves):
        if "lora_a" not in leaves:
            return leaves
        leaves = dict(leaves)
        pair = leaves.pop("lora_a"), leaves.pop("lora_b")
        change = jnp.matmul(*pair, precision="highest") * scale
        return {**leaves, "kernel": leaves["kernel"] + change}

    return Adapter(LORA if train_a else "/lora_b$", plan, call, merge, rank, alpha)


@checked
def bottleneck(*, rank: Width = 8, targets: Pattern = ".") -> Adapter:
    """Small layers behind layers: y + GELU(y D) U.

    Houlsby et al. 2019, arXiv:1902.00751, section 2.1; without biases. D is drawn, U is
    0. Leaves: adapter_down [O, rank], adapter_up [rank, O].

    Args:
      rank: width between the two.
      targets: as of `lora`.
    """

    def plan(model, params, head):
        del model
        layers = find_layers(params, targets, head)
        return lambda key: _draw(layers, key, pair)

    def pair(key, layer):
        dtype = layer.kernel.dtype
        down = normal(0.02)(key, (*layer.stack, layer.width, rank), dtype)
        up = jnp.zeros((*layer.stack, rank, layer.width), dtype)
        return {"adapter_down": down, "adapter_up": up}

    def call(run, module, *args):
        y = run(*args)
        if not _has_leaf(module, "adapter_down"):
            return y
        down, up = (
            module.get_variable("params", f"adapter_{x}").astype(y.dtype)
            for x in ("down", "up")
        )
        return y + jnp.matmul(nn.gelu(jnp.matmul(y, down)), up)

    return Adapter("/adapter_(down|up)$", plan, call, merge=None)


@checked
def prompt(*, num_tokens: Width = 8) -> Adapter:
    """Learned tokens in front of an image's, in the blocks of a transformer.

    Jia et al. 2022, arXiv:2203.12119, section 3.2 (VPT-shallow). What follows the
    blocks gets the image's tokens alone. Leaf: prompt [num_tokens, E].
    """

    def plan(model, params, head):
        del head
        width = _token_width(model)
        inside = ("backbone",) if "backbone" in params else ()  # of faces

        def draw(key) -> Leaves:
            return {(*inside, "prompt"): normal(0.02)(key, (num_tokens, width))}

        return draw

    def call(run, module, x, *rest):
        network = module.scope.root
        if not (isinstance(module, Stage) and network.has_variable("params", "prompt")):
            return run(x, *rest)
        tokens = network.get_variable("params", "prompt").astype(x.dtype)
        tokens = jnp.broadcast_to(tokens, (len(x), *tokens.shape))
        return run(jnp.concatenate([tokens, x], axis=1), *rest)[:, num_tokens:]

    return Adapter("^params/(backbone/)?prompt$", plan, call, merge=None)


def bias() -> Adapter:
    """The network's biases: BitFit (Ben Zaken et al. 2021, arXiv:2106.10199)."""
    return Adapter("/bias$")


def head() -> Adapter:
    """The head alone, a linear probe."""
    return Adapter("")


ADAPTERS = {
    "bias": bias,
    "bottleneck": bottleneck,
    "head": head,
    "lora": lora,
    "prompt": prompt,
}


def register_adapter(name: str, factory: Callable) -> None:
    """Register `factory(*, ...settings) -> Adapter` in ADAPTERS."""
    register(ADAPTERS, "adapter", name, factory)


@checked
def with_adapter(
    model: Model,
    adapter: Adapter,
    *,
    variables: PyTree = None,
    head: Pattern | None = None,
) -> Model:
    """Freeze a model but for an adapter and the head.

    Args:
      adapter: such as `ff.adapters.lora(rank=8, targets="qkv|proj")`.
      variables: of the model, such as trained ones: the result's `init` adds the
        adapter's leaves to them. None draws them too, and leaves the numbers of those
        that are frozen to `set_frozen`.
      head: pattern of other leaves that move, over paths such as `params/fc`; None is
        the last of `model.blocks`, "" none.

    Returns:
      A model over the leaves that move, see `with_frozen`.

    Raises:
      ValueError: for targets that match no layer, a rank above a layer's width, or a
        network without what the adapter changes.
    """
    adapted, frozen = adapt(model, adapter, head)
    if variables is None:
        return with_frozen(adapted, frozen)

    def init(key):
        return adapted_variables(adapted, variables, jax.random.fold_in(key, 1))

    known = init(jax.random.key(0))
    return with_frozen(adapted._replace(init=init), frozen, known)


def adapt(
    model: Model, adapter: Adapter, head: str | None = None, prefix: str = ""
) -> tuple[Model, str]:
    """A model with the leaves of an adapter, and the pattern of what it freezes.

    Args:
      model, adapter, head: as of `with_adapter`.
      prefix: where the network's params lie below params, such as "backbone/".
    """
    if head is None:
        head = f"^params/{prefix}{model.blocks[-1]}/" if model.blocks else ""
    if adapter.plan:
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        adapter = adapter._replace(draw=adapter.plan(model, shapes["params"], head))

    def init(key):
        return adapted_variables(adapted, model.init(key), jax.random.fold_in(key, 1))

    adapted = model.wrapped(with_calls(adapter.call))._replace(
        init=init,
        count_flops=None,
        config=model.config if adapter.merge else None,
        adapter=adapter,
    )
    _check(adapted)
    moves = "|".join(f"(?:{pattern})" for pattern in (adapter.moves, head) if pattern)
    network = f"^(?=params/{prefix})"
    return adapted, f"{network}(?!.*(?:{moves}))" if moves else network


def adapted_variables(model: Model, variables: PyTree, key: jax.Array) -> PyTree:
    """All variables of a network, with new leaves of an adapter.

    Args:
      model: of `with_adapter`.
      variables: all of the network that it was given.
      key: of the leaves that are drawn.
    """
    params, draw = variables["params"], model.adapter.draw
    for path, leaf in (draw(key) if draw else {}).items():
        params = _with_leaf(params, path, leaf)
    return {**variables, "params": params}


def merge_adapter(model: Model, variables: PyTree) -> PyTree:
    """Variables of the plain network that computes the same: W + A B alpha / rank.

    Args:
      model: of `with_adapter`.
      variables: of that model.

    Raises:
      ValueError: for a model without an adapter, or one that no plain network computes.
    """
    merge = model.adapter and model.adapter.merge
    if not merge:
        raise ValueError(
            "adapter must be lora, bias or head to be merged into its network, got "
            f"{'another' if model.adapter else 'none'}."
        )

    def merged(tree):
        if not isinstance(tree, dict):
            return tree
        return {key: merged(part) for key, part in merge(tree).items()}

    whole = whole_variables(model, variables)
    params = merged(scanned_blocks.by_block_name(whole["params"]))
    return {**whole, "params": scanned_blocks.unstack_like(params, whole["params"])}


def deployed_variables(model: Model, variables: PyTree) -> PyTree:
    """All variables of a network, with the adapter merged where that is possible."""
    if model.adapter is None or model.adapter.merge is None:
        return whole_variables(model, variables)
    return merge_adapter(model, variables)


class Layer(NamedTuple):
    """A dense layer or a convolution, or a stack of them."""

    name: str
    kernel: jax.ShapeDtypeStruct  # [*stack, ..., I, O]
    stack: tuple[int, ...]  # () or its length

    @property
    def width(self) -> int:
        """O."""
        return self.kernel.shape[-1]

    @property
    def fan_in(self) -> int:
        """Numbers that an output depends on."""
        return math.prod(self.kernel.shape[len(self.stack) : -1])


def find_layers(params: PyTree, targets: str, head: str) -> list[Layer]:
    """Layers whose kernel's path matches, but for the head.

    Raises:
      ValueError: for a pattern that matches none, or some of a stack.
    """
    found, names = [], []
    are_stacked = trees.by_name(scanned_blocks.are_stacked(params))
    for name, kernel in trees.by_name(params).items():
        stack = kernel.shape[:1] if are_stacked[name] else ()
        paths = [f"params/{path}" for path in scanned_blocks.block_paths(name)]
        is_layer = name.endswith("/kernel") and kernel.ndim - len(stack) in (2, 4)
        if not is_layer or head and any(re.search(head, path) for path in paths):
            continue
        names += paths
        matches = {re.search(targets, path) is not None for path in paths}
        if len(matches) > 1:
            raise ValueError(
                f"adapter.targets must match all blocks of {name} or none, got "
                f"{targets!r}."
            )
        if matches.pop():
            found.append(Layer(name.removesuffix("/kernel"), kernel, stack))
    if not found:
        near = difflib.get_close_matches(targets, names, trees.NEAR, cutoff=0)
        raise ValueError(
            f"adapter.targets must match a layer such as {', '.join(near)}, got "
            f"{targets!r}."
        )
    return found


def _draw(layers: list[Layer], key: jax.Array, draw: Callable) -> Leaves:
    """Leaves of all layers, of `draw(key, layer) -> {name: leaf}`."""
    leaves = {}
    keys = jax.random.split(key, len(layers))
    for layer, layer_key in zip(layers, keys, strict=True):
        for name, leaf in draw(layer_key, layer).items():
            leaves[(*layer.name.split("/"), name)] = leaf
    return leaves


def _with_leaf(tree: PyTree, path: tuple[str, ...], leaf: jax.Array) -> PyTree:
    """A tree of dicts with a leaf more."""
    first, *rest = path
    if rest:
        leaf = _with_leaf(tree[first], tuple(rest), leaf)
    return {**tree, first: leaf}


def _has_leaf(module: nn.Module, name: str) -> TypeGuard[nn.Dense | nn.Conv]:
    """Whether a module is a layer, of one group of channels, that has a leaf."""
    if isinstance(module, nn.Conv) and module.feature_group_count > 1:
        return False
    is_layer = isinstance(module, nn.Dense | nn.Conv)
    return is_layer and module.has_variable("params", name)


def with_calls(call: Callable) -> Callable[[Callable], Callable]:
    """Wrap functions like `Model.apply`, so that `call` computes their modules."""

    def intercept(run, args, kwargs, context):
        if kwargs or context.method_name != "__call__":
            return run(*args, **kwargs)
        return call(run, context.module, *args)

    def wrap(function):
        @functools.wraps(function)
        def apply(*args, **kwargs):
            with nn.intercept_methods(intercept):
                return function(*args, **kwargs)

        return apply

    return wrap


def _trace(model: Model, call: Callable) -> None:
    """Trace a network in evaluation, with `call` around its modules."""
    apply = model.wrapped(with_calls(call)).apply
    variables = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(apply, variables, input_structs(model.input_shape))


def _token_width(model: Model) -> int:
    """E of the tokens [B, P, E] of a network's blocks."""
    shapes = []

    def call(run, module, *args):
        if isinstance(module, Stage):
            shapes.append(args[0].shape)
        return run(*args)

    _trace(model, call)
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise ValueError(
            "adapter prompt needs a network with tokens, such as vit, got one without."
        )
    return shapes[0][-1]


def _check(model: Model) -> None:
    """Raise ValueError for leaves that no module of a network computes with."""
    adapter = model.adapter
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [f"params/{name}" for name in trees.by_name(shapes["params"])]
    if adapter.moves and not any(re.search(adapter.moves, x) for x in paths):
        raise ValueError(
            f"adapter must move leaves of the network, got none with {adapter.moves!r}."
        )
    new = jax.eval_shape(adapter.draw, jax.random.key(0)) if adapter.draw else {}
    layers = {path[:-1]: path[-1] for path in new if path[-1] != "prompt"}
    found = 0

    def call(run, module, *args):
        nonlocal found
        found += any(_has_leaf(module, name) for name in {*layers.values()})
        return run(*args)

    _trace(model, call)
    if found < len(layers):
        raise ValueError(
            f"adapter.targets must match layers of flax in one group of channels, got "
            f"{len(layers)}, of which the network has {found}. Narrow the pattern."
        )
