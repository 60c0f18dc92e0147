"""Classifiers of pooled feature statistics, against NumPy on all examples together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.federated.algorithms.one_shot import gaussian_layer, moments_of
from fedfr_jax.federated.feature_cache import keep_features
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.models import MODELS
from fedfr_jax.models.weights import read_weights
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.types import FeatureStorage
from tests.tasks import tiny

CLASSES, COUNT, DIM, SEED = 5, 48, 6, 3
SETTINGS = {"widths": (3, 4), "embedding_dim": DIM}
NETWORK = MODELS["cnn"]((8, 8, 1), num_classes=CLASSES, **SETTINGS)
VARIABLES = NETWORK.init(jax.random.key(0))
MODEL = ff.with_frozen(NETWORK, "params/(?!classifier)", VARIABLES)
LABELS = np.random.default_rng(1).integers(0, CLASSES - 1, COUNT)  # none of the last
IMAGES = np.random.default_rng(0).normal(size=(COUNT, 8, 8, 1)).astype(np.float32)
IMAGES += 0.5 * LABELS[:, None, None, None]
EVEN = np.arange(COUNT) // 12
SKEWED = np.minimum(np.argsort(np.argsort(LABELS, kind="stable")) // 9, 3)
NAMES = ("gaussian", "means", "ridge")


@functools.cache
def features():
    """What the classifier takes of all images, [T, D]."""
    return np.float64(jax.jit(NETWORK.features)(VARIABLES, IMAGES)[1])


def expected(name, weights=None, regularization=0.01):
    """Kernel and bias of weighted examples [T], in float64 and by other formulas."""
    x, weights = features(), np.ones(COUNT) if weights is None else weights
    kinds = np.unique(LABELS)
    kernel, bias = np.zeros((DIM, CLASSES)), np.full(CLASSES, -1e9)
    ridge = lambda s: s + regularization * np.trace(s) / DIM * np.eye(DIM)
    mean_of = functools.partial(np.average, axis=0)
    means = {c: mean_of(x[LABELS == c], weights=weights[LABELS == c]) for c in kinds}
    if name == "ridge":  # on centered features and labels
        y = np.eye(CLASSES)[LABELS]
        x, y = (v - mean_of(v, weights=weights) for v in (x, y))
        products = (np.einsum("t,td,tc->dc", weights, x, v) for v in (x, y))
        s, right = (v / weights.sum() for v in products)
        kernel = np.linalg.solve(ridge(s), right)
        share = np.bincount(LABELS, weights, CLASSES) / weights.sum()
        center = mean_of(features(), weights=weights)
        bias[kinds] = (share - center @ kernel)[kinds]
        return kernel, bias
    deviations = x - np.stack([means[c] for c in LABELS])
    s = np.einsum("t,td,te->de", weights, deviations, deviations) / weights.sum()
    inverse = np.linalg.inv(ridge(s)) if name == "gaussian" else np.eye(DIM)
    for c in kinds:
        share = weights[LABELS == c].sum() / weights.sum()
        kernel[:, c] = inverse @ means[c]
        bias[c] = -means[c] @ kernel[:, c] / 2
        bias[c] += np.log(share) if name == "gaussian" else 0
    return kernel, bias


def play(name, clients=EVEN, *, table=None, rounds=1, wrap=lambda x: x, **options):
    """The state of a run after its rounds."""
    data = ff.FederatedDataset.from_client_ids(IMAGES, LABELS, clients)
    data = data if table is None else data._replace(dataset=table)
    algorithm = wrap(ff.one_shot(model=MODEL, classifier=name))
    options = {"mesh": ff.make_mesh(1), "batch_size": 5, "seed": SEED, **options}
    run = ff.init(algorithm, data, ff.moving_variables(MODEL, VARIABLES), **options)
    return ff.run_rounds(run, rounds)[0]


def assert_layer(run, wanted, rtol=2e-3):
    layer = run.variables["params"]["classifier"]
    scale = np.abs(wanted[0]).max()
    np.testing.assert_allclose(layer["kernel"], wanted[0], rtol, atol=rtol * scale)
    np.testing.assert_allclose(layer["bias"], wanted[1], rtol, atol=rtol * scale)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_all_examples_whoever_has_them(name):
    wanted = expected(name)
    assert_layer(play(name), wanted)
    two = {"mesh": ff.make_mesh(2), "clients_per_device": 2, "batch_size": 4}
    assert_layer(play(name, SKEWED, **two), wanted)
    run = play(name, SKEWED, rounds=2)  # the same clients again
    assert_layer(run, wanted)
    whole = ff.whole_variables(MODEL, run.variables)
    predicted = NETWORK.output(whole, IMAGES).argmax(1)
    assert (predicted == (features() @ wanted[0] + wanted[1]).argmax(1)).mean() > 0.95
    assert CLASSES - 1 not in predicted


def test_a_round_adds_its_cohort_to_those_before():
    ids = [sample_cohort(SEED, r, 4, 3) for r in range(2)]
    times = np.bincount(np.concatenate(ids), minlength=4).astype(float)
    assert len({*times}) > 1
    run = play("gaussian", SKEWED, rounds=2, cohort_size=3)
    assert_layer(run, expected("gaussian", times[SKEWED]))


def test_features_of_a_cache_make_the_same_layer():
    table = ff.FederatedDataset.from_client_ids(IMAGES, LABELS, EVEN).dataset
    mesh, batching = ff.make_mesh(1), ff.Batching(5)
    kept = keep_features(MODEL, table, batching, mesh, FeatureStorage("device"))
    run = play("ridge", table=kept.table, batching=kept.batching)
    assert_layer(run, expected("ridge"))


def test_clients_send_their_statistics_alone():
    sizes = {}
    for name in NAMES:
        algorithm = ff.one_shot(model=MODEL, classifier=name)
        server = algorithm.init(ff.moving_variables(MODEL, VARIABLES))
        sizes[name] = sum(
            x.size for x in jax.tree.leaves(algorithm.update_like(server))
        )
    linear = CLASSES * (DIM + 1)
    both = linear + DIM * (DIM + 1) // 2
    assert sizes == {"means": linear, "gaussian": both, "ridge": both}


def private(noise):
    settings = ff.Privacy(1e6, noise, cohort_size=4, delta=1e-3)
    return functools.partial(ff.private, settings=settings)


def test_a_private_sum_has_clients_of_equal_weight_and_noise_moves_it():
    sizes = np.bincount(SKEWED)
    wanted = expected("gaussian", 1 / sizes[SKEWED])
    assert_layer(play("gaussian", SKEWED, wrap=private(0.0)), wanted)
    noisy = play("gaussian", SKEWED, wrap=private(1e-8)).server.inner.total
    plain = play("gaussian", SKEWED, wrap=private(0.0)).server.inner.total
    for name, x in plain.items():
        found = np.std(noisy[name] - x)
        assert 0.003 < found < 0.03, (name, found)  # 0.01 on the sum of four
    loud = play("gaussian", SKEWED, wrap=private(1e-6))  # S has no inverse any more
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loud.variables))


@pytest.mark.ci
def test_a_run_with_epsilon_saves_a_network_with_another_classifier(tmp_path):
    method = {"algorithm": "one_shot", "frozen": {"all_but_blocks": 1}}
    method["privacy"] = {"clip_norm": 10.0, "delta": 0.1, "epsilon": 8.0}
    given = tiny.config("classification", method)
    trainer = build(given).stages["x"].trainer
    start = ff.whole_variables(trainer.frozen_model, trainer.init_variables(None))
    summary = run_experiment(build(given), tmp_path)["methods"]["x"]
    assert 0 < summary["privacy"]["epsilon"] <= 8
    arrays = read_weights(tmp_path / "x" / "weights.safetensors").arrays
    start = trees.by_name(start)
    moved = {k for k, x in arrays.items() if np.any(x != start[k])}
    assert moved == {"params/classifier/kernel", "params/classifier/bias"}
    assert np.isfinite(np.concatenate([x.ravel() for x in arrays.values()])).all()


def without_bias(variables):
    layer = {**variables["params"]["classifier"], "bias": None}
    return {**variables, "params": {**variables["params"], "classifier": layer}}


MOVING = ff.moving_variables(MODEL, VARIABLES)
LOGISTIC = MODELS["logistic"]((4,), num_classes=3)


@pytest.mark.parametrize(
    ("model", "variables", "words"),
    [
        (NETWORK, VARIABLES, "one_shot must have one layer .* got .* numbers in"),
        (MODEL, without_bias(MOVING), "its kernel and its bias, got 30 numbers"),
        (
            LOGISTIC,
            LOGISTIC.init(jax.random.key(0)),
            r"must end in a linear layer of its features .* \(3,\) and the kernel \(4,",
        ),
        (NETWORK._replace(apply_with_features=None), MOVING, "model with features"),
    ],
)
def test_a_network_without_a_linear_layer_that_is_alone_is_refused(
    model, variables, words
):
    with pytest.raises(ValueError, match=words):
        ff.one_shot(model=model).init(variables)


def test_a_config_that_freezes_nothing_is_refused_before_it_compiles():
    given = tiny.config("classification", {"algorithm": "one_shot"})
    with pytest.raises(ValueError, match="^config.methods.x.* Freeze all but the cl"):
        build(given)


def test_a_rare_class_with_noise_leaves_the_others_their_layer():
    rng = np.random.default_rng(0)
    y = np.arange(600) % 3
    x = rng.normal(size=(600, 4)) + 4 * np.eye(4)[y]
    counts = np.array([200.0, 200, 200, 1e-10])  # the last from noise alone
    sums = np.stack([*(x[y == c].sum(0) for c in range(3)), np.ones(4)])
    moments = (x.T @ x)[np.triu_indices(4)]
    total = {"counts": counts, "features": sums, "moments": moments}
    total = {k: jnp.asarray(v, jnp.float32) for k, v in total.items()}
    kernel, bias = gaussian_layer(*moments_of(total), 0.01)
    found = (x @ np.asarray(kernel) + np.asarray(bias))[:, :3].argmax(1)
    assert (found == y).mean() > 0.95
