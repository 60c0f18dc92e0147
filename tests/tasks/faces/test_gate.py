"""The gate of the head moe learns which faces have a mask, from its own loss alone."""

import functools

import jax
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from fedfr_jax.central.settings import Training
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.tasks.faces.loss import COSFACE
from fedfr_jax.tasks.faces.public_classes import build_public_loss
from tests.tasks.faces import given

SHAPE, DIM, CLASSES = (16, 16, 1), 8, 4


@functools.cache
def network():
    settings = {"blocks": (1,), "widths": (4,), "embedding_dim": DIM, "head": "moe"}
    return MODELS["iresnet"](SHAPE, **settings)


@functools.cache
def start():
    @jax.jit
    def draw():
        backbone = network().init(jax.random.key(0))
        phi = jax.random.normal(jax.random.key(1), (CLASSES, DIM))
        params = {"backbone": backbone["params"], "phi": phi, "head": None}
        return {"params": params, "batch_stats": backbone["batch_stats"]}

    return draw()


def batch_of(seed, count=32, *, is_labeled=True):
    """Noise, every second image with an even lower half: its mask."""
    rng = np.random.default_rng(seed)
    images = rng.uniform(-1, 1, (count, *SHAPE)).astype(np.float32)
    images[::2, 8:] = rng.uniform(-1, 1, (count // 2, 1, 1, 1))
    number = np.arange(count, dtype=np.int32)
    labels, is_valid = number % CLASSES, number < count - 1  # the last is padding
    batch = given.batch_of(images, labels, is_valid=is_valid)
    targets = {"masked": 1 - number % 2} if is_labeled else {}
    return batch._replace(targets={**batch.targets, **targets})


def loss_with(weight):
    settings = Training(gate_weight=weight, loss=COSFACE.with_settings(scale=8.0))
    return build_public_loss(network(), settings, make_mesh(1))


@functools.partial(jax.jit, static_argnames="train")
def gate_logits(variables, batch, train=False):
    own = {**variables, "params": variables["params"]["backbone"]}
    return network().apply_with_features(own, batch.images, train)[1]


def gate_logit(variables, batch):
    logits = np.asarray(gate_logits(variables, batch))
    return logits[:, 1] - logits[:, 0]


@pytest.mark.ci
def test_after_some_steps_the_gate_tells_masked_faces_from_others():
    loss, optimizer = loss_with(1.0), optax.sgd(0.01, 0.9)

    @jax.jit
    def step(variables, state, batch):
        take = lambda params: loss({**variables, "params": params}, batch, None)
        params = variables["params"]
        (_, (stats, metrics)), grads = jax.jit(jax.value_and_grad(take, has_aux=True))(
            params
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "batch_stats": stats}, state, metrics["gate"]

    variables = start()
    state, fresh = optimizer.init(variables["params"]), batch_of(1000)
    before = gate_logit(variables, fresh)
    assert before[::2].min() < before[1::2].max()  # nothing is known yet
    for number in range(60):
        variables, state, value = step(variables, state, batch_of(number))
    after = gate_logit(variables, fresh)
    assert after[::2].min() > 0 > after[1::2].max()
    assert value < 0.2


def test_the_term_is_the_cross_entropy_of_valid_faces_times_its_weight():
    variables, batch = start(), batch_of(0)
    run = lambda weight: jax.jit(loss_with(weight))(variables, batch, None)
    (without, _), (total, (_, metrics)) = run(0.0), run(3.0)
    logits = np.asarray(gate_logits(variables, batch, train=True), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    by_hand = -log_p[np.arange(32), batch.targets["masked"]][:-1].mean()
    assert_allclose(metrics["gate"], by_hand, rtol=1e-5)
    assert_allclose(total, without + 3 * by_hand, rtol=1e-5)


def test_without_a_weight_or_labels_the_gate_has_the_mixtures_gradient_alone():
    variables = start()

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(weight, batch):
        loss = loss_with(weight)
        take = lambda params: loss({**variables, "params": params}, batch, None)[0]
        return jax.jit(jax.grad(take))(variables["params"])["backbone"]["gate"]

    mixture = gradient(0.0, batch_of(0, is_labeled=False))
    for weight, is_labeled in ((0.0, True), (1.0, False)):
        found = gradient(weight, batch_of(0, is_labeled=is_labeled))
        jax.tree.map(functools.partial(assert_allclose, rtol=1e-5), found, mixture)
    taught = gradient(1.0, batch_of(0))
    assert np.abs(taught["fc"]["kernel"] - mixture["fc"]["kernel"]).max() > 1e-3
