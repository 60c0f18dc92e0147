"""Stacked blocks are personal, frozen and stepped by name, as blocks of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax import scanned_blocks
from fedfr_jax.federated.algorithms.corrections import scaffold
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.algorithms.phases import fedrep
from fedfr_jax.federated.local import by_block, sgd
from fedfr_jax.types import LocalTraining
from tests.federated import toys

pytestmark = pytest.mark.ci

STAGE = {"block[2:6]": None}


def first_variables():
    """Four equal blocks in a stack, then a head."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)
    blocks = {"scale": draw(4, 16), "bias": draw(4, 16)}
    params = {"stage1": {"block[2:6]": blocks}, "head": draw(16, 3)}
    return {"params": params, "batch_stats": {}}


def loss(variables, batch, key, **round_args):
    """Softmax cross-entropy of a chain of blocks tanh(scale x + bias)."""
    params = variables["params"]
    blocks = scanned_blocks.unstack_like(params["stage1"], STAGE)["block[2:6]"]
    x = batch.images.reshape(len(batch.images), -1)
    for i in range(4):
        x = jnp.tanh(blocks["scale"][i][None] * x + blocks["bias"][i][None])
    logs = jax.nn.log_softmax(x @ params["head"])
    picked = jnp.take_along_axis(logs, batch.labels[:, None], 1)[:, 0]
    return -jnp.where(batch.is_valid, picked, 0).mean()


LOCAL = LocalTraining(loss, sgd(momentum=0.9), 0.1)
LARS = LocalTraining(loss, by_block(optax.lars), 0.1)


def twice(where, then):
    """One `with_personal_layers` in another."""
    return with_personal_layers(with_personal_layers(fedavg(LOCAL), where), then)


def drawn(key):
    """Another network, of which personal leaves are taken."""
    del key
    return jax.tree.map(lambda x: 2 * x, first_variables())


MADE = {
    "fedavg": lambda: with_personal_layers(fedavg(LOCAL), "block3/"),
    "drawn": lambda: with_personal_layers(
        fedavg(LOCAL), "block[35]/scale", init_per_client=drawn
    ),
    "scaffold": lambda: with_personal_layers(
        scaffold(LOCAL, num_clients=5), "block[23]/"
    ),
    "twice": lambda: twice("block4/scale", "block[45]/bias|head"),
    "fedrep": lambda: fedrep(LOCAL, head="block5|head", head_epochs=1),
    "lars": lambda: fedavg(LARS),
}


def two_rounds(algorithm, variables):
    """Networks of all clients, [N, ...], with named blocks."""
    sim = toys.build(algorithm, local_epochs=2)
    server, rows, *_ = toys.play(sim, variables, 2)
    networks = jax.vmap(
        lambda row: scanned_blocks.by_block_name(algorithm.personalize(server, row)),
        axis_size=len(toys.SIZES),
    )
    return networks(rows)


@functools.cache
def end_of(name, is_stacked=True):
    """The networks after `two_rounds` of MADE[name]."""
    variables = first_variables()
    return two_rounds(
        MADE[name](),
        variables if is_stacked else scanned_blocks.by_block_name(variables),
    )


QUICK = {("fedavg",), ("fedrep",), ("twice",)}


@pytest.mark.parametrize("name", toys.others_are_slow(QUICK, MADE))
def test_stacked_blocks_are_trained_as_named_ones(name):
    ends = [end_of(name), end_of(name, is_stacked=False)]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *ends)
    again = scanned_blocks.by_block_name(first_variables())["params"]
    moved = jax.tree.map(lambda x, y: np.any(x != y[None]), ends[0]["params"], again)
    assert all(jax.tree.leaves(moved))


def test_the_order_of_two_predicates_changes_nothing():
    other = twice("block[45]/bias|head", "block4/scale")
    ends = [end_of("twice"), two_rounds(other, first_variables())]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, *ends)
    spread = jax.tree.map(lambda x: bool(np.any(x[0] != x[1])), ends[0]["params"])
    own = {"block4": {"scale": True, "bias": True}}
    own |= {"block5": {"scale": False, "bias": True}}
    none = {"scale": False, "bias": False}
    assert spread == {
        "head": True,
        "stage1": {"block2": none, "block3": none, **own},
    }


def test_only_personal_blocks_of_a_stack_stay_with_the_client():
    server = MADE["fedavg"]().init(first_variables())
    kept, sent = server.first["params"], server.inner.variables["params"]
    held = lambda tree: {k for k, x in tree["stage1"].items() if jax.tree.leaves(x)}
    assert held(kept) == {"block3"}
    assert held(sent) == {"block2", "block[4:6]"}
    with pytest.raises(ValueError, match="leaf such as.*stage1/block5/scale"):
        with_personal_layers(fedavg(LOCAL), "stage1/block9/scale").init(
            first_variables()
        )
