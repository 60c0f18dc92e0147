"""Stacks of blocks against a plain loop over them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedfr_jax.models import MODELS
from fedfr_jax.models.block_scan import run_stack
from fedfr_jax.models.iresnet import Block
from fedfr_jax.models.layers import LayerSettings
from fedfr_jax.models.norm import inverses

WIDTH = 8
X, DY = jax.random.normal(jax.random.key(0), (2, 4, 6, 6, WIDTH))


class Stack(nn.Module):
    length: int
    scan: bool

    @nn.compact
    def __call__(self, x, train):
        block = Block(WIDTH, LayerSettings(), name="blocks")
        return run_stack(block, x, train, length=self.length, scan=self.scan)


def _variables(module):
    """What the module starts from, every leaf with other numbers."""
    variables = jax.jit(lambda: module.init(jax.random.key(1), X, train=False))()
    leaves, structure = jax.tree.flatten(variables)
    noise = np.random.default_rng(0)
    shaken = [
        np.asarray(x) + noise.uniform(0.1, 0.5, x.shape).astype(x.dtype) for x in leaves
    ]
    return structure.unflatten(shaken)


def _loop(variables, x, train, length):
    """The blocks one by one: -> (x, statistics with a leading axis)."""
    block, stats = Block(WIDTH, LayerSettings()), []
    for i in range(length):
        own = jax.tree.map(lambda a, i=i: a[i], variables)
        own = {name: tree["blocks"] for name, tree in own.items()}
        x, new = block.apply(own, x, train, mutable=["batch_stats"])
        stats.append(new["batch_stats"])
    return x, jax.tree.map(lambda *a: jnp.stack(a), *stats)


@pytest.mark.parametrize(("length", "scan"), [(1, True), (3, True), (3, False)])
def test_a_stack_is_its_blocks_one_after_the_other(length, scan):
    module = Stack(length, scan)
    variables = _variables(module)

    def run(params, x):
        own = {**variables, "params": params}
        y, new = module.apply(own, x, train=True, mutable=["batch_stats"])
        return y, new["batch_stats"]["blocks"]

    def want(params, x):
        return _loop({**variables, "params": params}, x, True, length)

    def ends(function):
        y, pull, stats = jax.vjp(function, variables["params"], X, has_aux=True)
        return y, stats, pull(DY)

    both = (jax.jit(ends, static_argnums=0)(function) for function in (run, want))
    chex.assert_trees_all_close(*both, rtol=1e-4, atol=1e-4)

    @jax.jit
    def evaluated(x):
        frozen = {**variables, "inverse": inverses(variables["batch_stats"])}
        y = module.apply(frozen, x, train=False)
        return y, _loop(variables, x, False, length)[0]

    chex.assert_trees_all_close(*evaluated(X), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_deepest_iresnet_is_no_longer_a_program_than_iresnet_50():
    """So it compiles about as fast: 80 and 512 equal blocks are loops like 4 and 14."""

    def program(depth):
        model = MODELS["iresnet"]((16, 16, 3), depth=depth, widths=(2, 2, 2, 2))
        variables = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params, stats, x):
            given = {"params": params, "batch_stats": stats}
            output, stats = model.apply(given, x, True)
            return (output**2).sum(), stats

        gradient = jax.jit(jax.grad(loss, has_aux=True))
        x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
        return gradient.lower(*map(variables.get, ("params", "batch_stats")), x)

    shallow, deep = (len(program(depth).as_text()) for depth in (50, 1200))
    assert deep == pytest.approx(shallow, rel=0.01)
