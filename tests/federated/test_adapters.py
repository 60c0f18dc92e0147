"""Rounds of adapters: one base for all lanes, personal rows, privacy."""

import re

import chex
import dp_accounting
import jax
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.models import MODELS
from fedfr_jax.models.adapters import bottleneck, lora, prompt
from fedfr_jax.tasks.classification import cross_entropy

BASE = MODELS["vit"](
    (8, 8, 1), width=8, depth=4, num_heads=2, patch_size=4, embedding_dim=3
)
VARIABLES = jax.tree.map(
    lambda x: x + 0.2 * np.random.default_rng(0).uniform(size=x.shape).astype(x.dtype),
    BASE.init(jax.random.key(0)),
)
NUM_CLIENTS, EACH, LANES = 6, 5, 2


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_CLIENTS * EACH, 8, 8, 1)).astype(np.float32)
    y = np.arange(len(x)) % 3
    return ff.FederatedDataset.from_client_ids(x, y, np.arange(len(x)) // EACH)


def start(model, build=ff.fedavg, devices=1):
    local = ff.LocalTraining(cross_entropy(model), optax.sgd, 0.1)
    options = {"clients_per_device": LANES, "mesh": ff.make_mesh(devices)}
    variables = model.init(jax.random.key(3))
    return ff.init(build(local), data(), variables, batch_size=2, **options)


ADAPTERS = {
    "lora": lora(rank=2, targets="qkv|proj"),
    "bottleneck": bottleneck(rank=2, targets="fc2"),
    "prompt": prompt(num_tokens=2),
}


OTHERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ADAPTERS if name != "lora"
]


@pytest.mark.parametrize("name", ["lora", *OTHERS])
def test_adapters_train_and_lanes_share_the_base(name):
    model = ff.with_adapter(BASE, ADAPTERS[name], variables=VARIABLES, head="")
    run = start(model)
    before = run.variables
    text = run.sim.programs.run_whole.lower(
        *round_arguments(run.sim, run.server)
    ).as_text()
    for shape in ("8x24", "3x8x24", "8x32", "3x8x32"):  # of kernels, and of a stack's
        assert not re.search(rf"<({LANES}|\d+x{LANES})x{shape}xf32", text)
    run, _ = ff.run_rounds(run, 2)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), run.variables, before)
    assert min(jax.tree.leaves(moved)) > 0
    sizes = [x.size for x in jax.tree.leaves(run.variables)]
    assert sum(sizes) < 0.2 * trees.count(VARIABLES)


@pytest.mark.slow
def test_devices_change_nothing():
    model = ff.with_adapter(BASE, ADAPTERS["lora"], variables=VARIABLES)
    ends = [ff.run_rounds(start(model, devices=x), 1)[0] for x in (1, 2)]
    chex.assert_trees_all_close(*(x.variables for x in ends), rtol=1e-3, atol=1e-4)


def test_rows_of_personal_adapters_have_nothing_of_the_base():
    def personal(local):
        return ff.with_personal_layers(ff.fedavg(local), "lora_[ab]$")

    model = ff.with_adapter(BASE, ADAPTERS["lora"], variables=VARIABLES)
    run, _ = ff.run_rounds(start(model, personal), 1)
    # qkv and proj of four blocks, rank 2: A is [8, 2], B [2, 24] and [2, 8]
    expected = 4 * 4 * (8 * 2 + 2 * 24 + 8 * 2 + 2 * 8)
    assert trees.num_bytes(run.store.template) == expected


@pytest.mark.ci
def test_a_million_clients_have_adapters_of_their_own():
    many = 10**6
    table = ff.FederatedDataset.from_reader(
        lambda rows: np.ones((len(rows), 8, 8, 1), np.float32),
        np.broadcast_to(np.int32(0), many),
        num_clients=many,
        num_classes=3,
    )
    model = ff.with_adapter(BASE, ADAPTERS["lora"], variables=VARIABLES)
    local = ff.LocalTraining(cross_entropy(model), optax.sgd, 0.1)
    algorithm = ff.with_personal_layers(ff.fedavg(local), "lora_[ab]$")
    variables = model.init(jax.random.key(3))
    run = ff.init(algorithm, table, variables, batch_size=2, cohort_size=4)
    run, metrics = ff.run_round(run)
    np.testing.assert_array_equal(run.store.touched(), np.sort(metrics["client"]))
    assert metrics["client"].max() > many / 100
    assert trees.num_bytes(run.store.template) < 2000


@pytest.mark.ci
def test_private_adapters_have_an_epsilon():
    privacy = ff.Privacy(
        clip_norm=0.5, noise_multiplier=1.0, delta=1e-2, cohort_size=NUM_CLIENTS
    )
    model = ff.with_adapter(BASE, ADAPTERS["lora"], variables=VARIABLES, head="")
    run, (metrics,) = ff.run_rounds(
        start(model, lambda local: ff.private(ff.fedavg(local), privacy)), 1
    )
    # Of a Gaussian of the sensitivity: base, lanes and rank are not in it.
    expected = dp_accounting.get_epsilon_gaussian(1.0, 1e-2)
    np.testing.assert_allclose(metrics["epsilon"], expected, rtol=1e-4)
    before = model.init(jax.random.key(3))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), run.variables, before)
    assert min(jax.tree.leaves(moved)) > 0
