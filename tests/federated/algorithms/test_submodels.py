"""Ranks and widths of each client, and the mean of products, against plain loops."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.federated.variable_split import update_of
from fedfr_jax.models import MODELS
from fedfr_jax.models.adapters import lora
from fedfr_jax.models.hidden_channels import hidden_axes
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.tasks.classification import cross_entropy

MODEL = MODELS["mlp"]((6,), hidden_dim=8, num_classes=3)
KEY = jax.random.key(0)
NUM_CLIENTS, EACH, RATE = 6, 4, 0.1
RANKS = [1, 2, 4, 2, 1, 1]


def data(num_clients=NUM_CLIENTS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_clients * EACH, 6)).astype(np.float32)
    y = np.arange(len(x)) % 3
    return ff.FederatedDataset.from_client_ids(x, y, np.arange(len(x)) // EACH)


def adapted(rank=4, **settings):
    base = MODELS["mlp"]((6,), hidden_dim=8, num_classes=3)
    adapter = lora(rank=rank, targets="fc", **settings)
    model = ff.with_adapter(base, adapter, variables=base.init(KEY))
    return model, shaken(model.init(KEY))


def shaken(tree, seed=0):
    rng = np.random.default_rng(seed)
    shake = lambda x: (x + 0.3 * rng.normal(size=x.shape)).astype(x.dtype)
    return jax.tree.map(shake, tree)


def play(
    model, variables, build=ff.fedavg, *, rounds=1, devices=1, clients=NUM_CLIENTS
):
    """A round of whole batches: one step of each client."""
    local = ff.LocalTraining(cross_entropy(model), optax.sgd, RATE)
    mesh, batch = ff.make_mesh(devices), {"batch_size": EACH, "local_epochs": 2}
    options = {"mesh": mesh, "clients_per_device": 3 if clients > 1 else 1, **batch}
    run = ff.init(build(local), data(clients), variables, **options)
    return ff.run_rounds(run, rounds)[0].variables


def trained(model, variables, client):
    """Variables after two steps on all examples of a client."""
    table = data().dataset
    rows = slice(client * EACH, (client + 1) * EACH)
    x, y = table.images[rows], table.labels[rows]

    def loss(params):
        logits = model.output({**variables, "params": params}, x)
        values = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return values.mean()

    for _ in range(2):
        grads = jax.grad(loss)(variables["params"])
        step = lambda x, g: x - RATE * g
        params = jax.tree.map(step, variables["params"], grads)
        variables = {**variables, "params": params}
    return variables


def with_first_ranks(variables, rank, rest):
    """Variables whose entries beyond a rank are those of `rest`."""

    def cut(path, x, other):
        name = trees.path_name(path)
        place = np.arange(x.shape[-1]) if name.endswith("lora_a") else None
        if name.endswith("lora_b"):
            place = np.arange(x.shape[0])[:, None]
        return x if place is None else np.where(place < rank, x, other)

    return jax.tree_util.tree_map_with_path(cut, variables, rest)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_entry_is_averaged_over_the_clients_that_have_it(devices):
    model, variables = adapted()
    ranked = lambda local: ff.with_ranks(ff.fedavg(local), RANKS)
    found = play(model, variables, ranked, devices=devices)
    zeros = jax.tree.map(np.zeros_like, variables)
    changes = []
    for client, rank in enumerate(RANKS):
        start = with_first_ranks(variables, rank, zeros)
        changes.append(update_of(trained(model, start, client), start))

    def mean(path, x, *changes):
        name = trees.path_name(path)
        expected = np.array(x)
        for j in range(4):
            has = [c for c, rank in zip(changes, RANKS, strict=True) if j < rank]
            if name.endswith("lora_a"):
                expected[:, j] += np.mean([c[:, j] for c in has], 0)
            elif name.endswith("lora_b"):
                expected[j] += np.mean([c[j] for c in has], 0)
        return expected if "lora" in name else x + np.mean(changes, 0)

    expected = jax.tree_util.tree_map_with_path(mean, variables, *changes)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_full_ranks_are_plain_and_ranks_that_nobody_has_stay():
    model, variables = adapted()
    plain = play(model, variables, rounds=2)
    full = lambda local: ff.with_ranks(ff.fedavg(local), [4, 5, 9, 4, 4, 4])
    chex.assert_trees_all_close(
        play(model, variables, full, rounds=2), plain, rtol=1e-5, atol=1e-6
    )
    low = lambda local: ff.with_ranks(ff.fedavg(local), [(0.5, 1), (0.5, 2)])
    found = play(model, variables, low, rounds=2)
    before, after = (x["params"]["fc"] for x in (variables, found))
    np.testing.assert_array_equal(after["lora_a"][:, 2:], before["lora_a"][:, 2:])
    np.testing.assert_array_equal(after["lora_b"][2:], before["lora_b"][2:])
    assert np.abs(after["lora_b"][:2] - before["lora_b"][:2]).min() > 0


def best_product(products, rank):
    left, sizes, right = np.linalg.svd(np.mean(products, 0), full_matrices=False)
    return (left[:, :rank] * sizes[:rank]) @ right[:rank]


def test_the_new_product_is_the_best_of_its_rank():
    model, variables = adapted(rank=2)
    products = lambda local: ff.with_products(ff.fedavg(local))
    ends = [trained(model, variables, client) for client in range(NUM_CLIENTS)]
    product = lambda x: (
        np.asarray(x["params"]["fc"]["lora_a"]) @ x["params"]["fc"]["lora_b"]
    )
    found = play(model, variables, products)
    expected = best_product([product(x) for x in ends], 2)
    np.testing.assert_allclose(product(found), expected, rtol=1e-4, atol=1e-5)
    plain = play(model, variables)
    assert np.abs(product(plain) - expected).max() > 1e-3  # A and B alone are not exact
    heads = [x["params"]["classifier"]["kernel"] for x in (found, plain)]
    np.testing.assert_allclose(*heads, rtol=1e-5, atol=1e-6)


def test_one_clients_product_of_full_rank_is_kept():
    model, variables = adapted(rank=6)
    products = lambda local: ff.with_products(ff.fedavg(local))
    found = play(model, variables, products, clients=1)
    plain = play(model, variables, clients=1)
    merged = [ff.merge_adapter(model, x)["params"] for x in (found, plain)]
    chex.assert_trees_all_close(*merged, rtol=1e-4, atol=1e-5)


def test_products_of_stacked_blocks_are_of_each_block():
    base = MODELS["vit"]((8, 8, 1), width=8, depth=4, num_heads=2, patch_size=4)
    model = ff.with_adapter(
        base, lora(rank=2, targets="qkv|patches"), variables=base.init(KEY), head=""
    )
    variables = shaken(model.init(KEY))
    algorithm = ff.with_products(
        ff.fedavg(lambda key, variables, client: (shaken(variables, 1), {}))
    )
    server = algorithm.init(variables)

    class Client:
        num_examples = jnp.int32(1)

    output = algorithm.client_update(KEY, server, (), Client())
    from fedfr_jax.types import RoundResult

    result = RoundResult(output.update, (), {}, (), jnp.int32(0))
    found = algorithm.global_model(algorithm.server_update(server, result))
    expected = shaken(variables, 1)
    merged = [
        by_block_name(ff.merge_adapter(model, x)["params"]) for x in (found, expected)
    ]
    chex.assert_trees_all_close(*merged, rtol=1e-4, atol=1e-5)


NETWORKS = {
    "cnn": (
        {"widths": (4, 6), "embedding_dim": 8, "num_classes": 3},
        {"widths": (2, 3), "embedding_dim": 4, "num_classes": 3},
    ),
    "mlp": ({"hidden_dim": 8, "num_classes": 3}, {"hidden_dim": 4, "num_classes": 3}),
    "resnet": (
        {"blocks": (1, 1, 1, 1), "widths": (4, 4, 8, 8), "num_classes": 3},
        {"blocks": (1, 1, 1, 1), "widths": (2, 2, 4, 4), "num_classes": 3},
    ),
    "iresnet": (
        {"blocks": (2, 1, 1, 1), "widths": (4, 4, 8, 8), "embedding_dim": 6},
        {"blocks": (2, 1, 1, 1), "widths": (2, 2, 4, 4), "embedding_dim": 6},
    ),
}
SIDE = (16, 16, 3)


def narrowed(name, variables, narrow):
    """Leaves of a network in the shapes of a narrow one: its first channels."""
    axes = hidden_axes(MODELS[name](SIDE, **NETWORKS[name][0]))

    def cut(path, x, like):
        for axis, channels in axes[path].items():
            place = np.arange(x.shape[axis]) % channels < math.ceil(channels / 2)
            x = np.compress(place, x, axis)
        assert x.shape == like.shape
        return x

    def of_collection(key):
        like = trees.by_name(by_block_name(narrow[key]))
        leaves = trees.by_name(by_block_name(variables[key]))
        whole = {k: cut(k, np.asarray(x), like[k]) for k, x in leaves.items()}
        structure = jax.tree.structure(by_block_name(narrow[key]))
        return structure.unflatten([whole[k] for k in like])

    return {key: of_collection(key) for key in ("params", "batch_stats")}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_part_of_a_network_is_the_narrow_network(name):
    wide, narrow = (MODELS[name](SIDE, **x) for x in NETWORKS[name])
    variables = shaken(wide.init(KEY))
    seen = []

    def remember(key, variables, client):
        seen.append(variables)
        return variables, {}

    algorithm = ff.with_widths(ff.fedavg(remember), wide, [0.5, 1])

    class Client:
        id = num_examples = jnp.int32(0)

    algorithm.client_update(KEY, algorithm.init(variables), (), Client())
    (part,) = seen
    small = narrowed(name, variables, narrow.init(KEY))
    x = jax.random.normal(jax.random.key(1), (4, *SIDE))
    loss = lambda model, v, p: (model.apply({**v, "params": p}, x, True)[0] ** 2).sum()

    def run(model, v):
        grad = jax.value_and_grad(lambda p: loss(model, v, p))
        return jax.jit(grad)(v["params"])

    (value, grads), (expected, _) = run(wide, part), run(narrow, small)
    assert np.isfinite(value)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    beyond = jax.tree.map(
        lambda w, p, g: jnp.where(p == w, 0, g),
        variables["params"],
        part["params"],
        grads,
    )
    assert not any(np.any(x) for x in jax.tree.leaves(beyond))


def test_widths_of_one_share_train_the_narrow_network():
    wide, narrow = (MODELS["mlp"]((6,), hidden_dim=x, num_classes=3) for x in (8, 4))
    variables = shaken(wide.init(KEY))
    halves = lambda local: ff.with_widths(ff.fedavg(local), wide, [0.5] * NUM_CLIENTS)
    found = play(wide, variables, halves, rounds=2)["params"]
    first = variables["params"]
    small = {
        "fc": {"kernel": first["fc"]["kernel"][:, :4], "bias": first["fc"]["bias"][:4]},
        "classifier": {
            **first["classifier"],
            "kernel": first["classifier"]["kernel"][:4],
        },
    }
    expected = play(narrow, {**variables, "params": small}, rounds=2)["params"]
    close = {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(
        found["fc"]["kernel"][:, :4], expected["fc"]["kernel"], **close
    )
    np.testing.assert_array_equal(
        found["fc"]["kernel"][:, 4:], first["fc"]["kernel"][:, 4:]
    )
    np.testing.assert_allclose(
        found["classifier"]["bias"], expected["classifier"]["bias"], **close
    )


def test_channels_are_averaged_over_the_clients_that_have_them():
    model, shares = MODEL, [0.25, 0.5, 1.0, 0.5, 0.3, 0.25]
    variables = shaken(model.init(KEY))
    mixed = lambda local: ff.with_widths(ff.fedavg(local), model, shares)
    found = play(model, variables, mixed)["params"]
    sizes = [math.ceil(8 * x) for x in shares]
    first = jax.tree.map(np.asarray, variables["params"])
    total = {key: np.zeros((8,)) for key in ("bias", "kernel")}
    total["kernel"] = np.zeros((6, 8))
    for client, size in enumerate(sizes):
        start = {
            "fc": {
                k: np.where(np.arange(8) < size, x, 0) for k, x in first["fc"].items()
            },
            "classifier": {
                **first["classifier"],
                "kernel": np.where(
                    np.arange(8)[:, None] < size, first["classifier"]["kernel"], 0
                ),
            },
        }
        end = trained(model, {**variables, "params": start}, client)["params"]["fc"]
        for key in total:
            total[key] += np.asarray(end[key]) - start["fc"][key]
    counts = np.array([sum(size > j for size in sizes) for j in range(8)])
    assert counts.tolist() == [6, 6, 4, 3, 1, 1, 1, 1]
    for key, sums in total.items():
        expected = first["fc"][key] + sums / counts
        np.testing.assert_allclose(found["fc"][key], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "a number for each client"),
        ([0, 1], "positive int"),
        ([1.5], "positive int"),
        ([(0.5, 2)], "sum 1"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks, words):
    with pytest.raises(ValueError, match=words):
        ff.with_ranks(ff.fedavg(lambda *x: x), ranks)


def test_widths_of_a_network_with_layer_norms_are_refused():
    base = MODELS["vit"]((8, 8, 1), width=8, depth=2, num_heads=2, patch_size=4)
    with pytest.raises(ValueError, match="must have dense layers, convolutions"):
        ff.with_widths(ff.fedavg(lambda *x: x), base, [0.5])
    with pytest.raises(ValueError, match=r"shares must be in \(0, 1\]"):
        ff.with_widths(ff.fedavg(lambda *x: x), MODEL, [2.0])


def test_widths_of_a_network_with_groups_of_channels_are_refused():
    for base in (
        MODELS["mobilenet"]((16, 16, 3), num_classes=3, num_blocks=8, width=0.05),
        MODELS["mobilefacenet"]((32, 32, 3), embedding_dim=4),
    ):
        with pytest.raises(ValueError, match="convolutions in one group of channels"):
            ff.with_widths(ff.fedavg(lambda *x: x), base, [0.5])


def test_ranks_of_a_frozen_factor_and_of_another_mean_are_refused():
    model, variables = adapted(train_a=False)
    ranked = lambda local: ff.with_ranks(ff.fedavg(local), RANKS)
    with pytest.raises(ValueError, match="whose A and B are trained, got frozen A in"):
        play(model, variables, ranked)
    privacy = ff.Privacy(
        clip_norm=1.0, noise_multiplier=1.0, delta=1e-2, cohort_size=NUM_CLIENTS
    )
    for around in (
        lambda x: ff.private(x, privacy),
        lambda x: ff.with_aggregation(x, ff.aggregation.median()),
    ):
        plain = ff.fedavg(lambda *x: x)
        with pytest.raises(ValueError, match="plain mean"):
            around(ff.with_ranks(plain, RANKS))
        with pytest.raises(ValueError, match="ranks and widths need"):
            ff.with_ranks(around(plain), RANKS)


def test_a_rank_for_every_client_is_needed():
    model, variables = adapted()
    ranked = lambda local: ff.with_ranks(ff.fedavg(local), RANKS[:-1])
    with pytest.raises(ValueError, match="with_ranks"):
        play(model, variables, ranked)


def test_ranks_of_a_network_without_lora_are_refused():
    local = ff.LocalTraining(lambda *_: None, optax.sgd, 0.1)
    ranked = ff.with_ranks(ff.fedavg(local), [(1.0, 2)])
    with pytest.raises(ValueError, match="a model with the adapter lora, got"):
        ranked.init({"params": {"fc": {"kernel": np.ones((2, 2))}}, "batch_stats": {}})
