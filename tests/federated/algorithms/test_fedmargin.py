"""FedMargin: prototypes, margins, attention, and whole rounds against a plain loop."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.federated.algorithms import prototypes
from fedfr_jax.federated.algorithms.fedmargin import Server, fedmargin
from fedfr_jax.federated.algorithms.prototypes import Prototypes
from fedfr_jax.federated.local import sgd
from fedfr_jax.types import LocalTraining, Model
from tests.federated.toys import (
    LOCAL,
    RATE,
    close,
    flat,
    norm_loss,
    norm_variables,
    play_golden,
    replay,
)

RAW = {"measure": "hypothesis", "normalize_features": False}
GOLDEN = {  # golden file and prefix: options
    ("fedmargin_displacement", "unit_T1.0"): {},
    ("fedmargin_displacement", "unit_T0.2"): {"temperature": 0.2},
    ("fedmargin_displacement", "raw_T1.0"): {"normalize_features": False},
    ("fedmargin_displacement", "raw_T0.2"): {
        "normalize_features": False,
        "temperature": 0.2,
    },
    ("fedmargin_proposed", "hypothesis"): RAW,
}


def linear_features(variables, x, train):
    """Logits, features behind the body, statistics: x [B, 5] -> [B, 4] -> [B, 3]."""
    del train
    features = x @ variables["params"]["body"]
    return features @ variables["params"]["head"], features, {}


def linear_loss(variables, batch, key):
    del key
    logits, _, _ = linear_features(variables, batch.images, True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
    return jnp.where(batch.is_valid, losses, 0).sum() / count


def first_variables():
    draw = np.random.default_rng(5).normal
    params = {"body": draw(size=(5, 4)), "head": draw(size=(4, 3))}
    return {"params": params, "batch_stats": {}}


LINEAR = Model(
    init=lambda key: jax.tree.map(jnp.float32, first_variables()),
    apply=lambda *arguments: linear_features(*arguments)[::2],
    input_shape=(5,),
    embedding_dim=3,
    apply_with_features=linear_features,
)


# --- Golden prototypes


def golden_round(arrays, *, scale=1.0, **options):
    """A round whose clients have the golden prototypes times `scale`.

    Each class of a client is one row of the network's table of features, with as many
    equal examples as the golden counts. Client k ends with the k-th unit vector as its
    other parameter, so that the average of these is the attention itself.
    """
    counts, size = arrays["counts"], arrays["counts"].size

    def features(variables, x, train):
        del train
        found = x @ variables["params"]["table"]
        return found, found, variables["batch_stats"]

    def train(key, variables, client):
        del key, variables
        mine = jnp.arange(len(counts), dtype=jnp.int32) == client.id
        table = scale * arrays["proto_after"].reshape(size, -1)
        params = {"table": jnp.asarray(table), "attention": mine.astype(float)}
        metrics = {"loss": jnp.zeros(()), "steps": jnp.float32(1)}
        return {"params": params, "batch_stats": {}}, metrics

    table = scale * arrays["proto_before"].reshape(size, -1)
    params = {"table": table, "attention": np.zeros(len(counts))}
    model = Model(
        lambda key: {"params": params, "batch_stats": {}}, None, (size,), 5, (), None
    )._replace(apply_with_features=features)
    rows = np.arange(size).reshape(counts.shape)
    images = [np.eye(size)[np.repeat(r, n)] for r, n in zip(rows, counts, strict=True)]
    labels = [np.repeat(np.arange(5), n) for n in counts]
    algorithm = fedmargin(train, model=model, **options)
    last = scale * arrays["agg_prev"]
    if options.get("normalize_features", True):
        last = last / np.linalg.norm(last, axis=1, keepdims=True)
    last = Prototypes(last, np.ones(5))
    algorithm = algorithm._replace(init=lambda variables: Server(variables, last))
    start = {"params": params, "batch_stats": {}}
    return replay(algorithm, (images, labels), start, where=(2, 2), rows=())


def case_of(name):
    """Each measure, temperature and normalization once, the others slow."""
    marks = pytest.mark.slow if name[1] in ("unit_T0.2", "raw_T1.0") else ()
    return pytest.param(name, marks=marks, id=" ".join(name))


@pytest.mark.parametrize("name", [case_of(name) for name in GOLDEN])
def test_a_round_has_the_golden_attention_and_prototypes(golden, name):
    file, prefix = name
    arrays, options = golden(file), GOLDEN[name]
    form = prefix.partition("_")[0]
    now = golden("fedmargin_proposed")["agg_now"]
    weights = {"uniform": ""}
    if prefix in ("unit_T1.0", "hypothesis"):  # of each measure once
        weights["num_examples"] = "_times_nk"
    for weighting, suffix in weights.items():
        with jax.enable_x64(True):
            end = golden_round(arrays, weighting=weighting, **options)
        want = arrays[f"{prefix}_attn{suffix}"]
        close(end.servers[0].variables["params"]["attention"], want)
        close(end.metrics["lpm"], arrays[f"{form}_lpm"])
        close(end.metrics["apm"], arrays[f"{form}_apm"])
        close(end.metrics["attention"], want)
        close(
            end.metrics["attention_entropy"], np.full(4, -(want * np.log(want)).sum())
        )
        if form != "unit":  # of raw features, whatever the measure
            close(end.servers[0].prototypes.mean, now)
            amm = golden("fedmargin_proposed")["hypothesis_amm"]
            close(end.metrics["amm"], np.full(4, float(amm)))


def test_the_client_whose_prototypes_move_further_has_more_attention(golden):
    """By displacement; by the hypothesis margin it has less."""
    arrays = {**golden("fedmargin_proposed")}
    one = {name: np.broadcast_to(x, x.shape).copy() for name, x in arrays.items()}
    one["counts"] = np.full((4, 5), 2)
    one["proto_before"] = 10 * np.broadcast_to(np.eye(5, 7), (4, 5, 7))
    one["agg_prev"] = one["proto_before"][0]
    step = np.eye(7)[np.array([6] * 5)]  # away from all classes alike
    one["proto_after"] = one["proto_before"] + np.arange(4)[:, None, None] * step
    for options, sign in (({}, 1), (RAW, -1)):
        with jax.enable_x64(True):
            end = golden_round(one, **options)
        assert (sign * np.diff(end.metrics["attention"]) > 0).all(), options


def test_attention_to_margins_of_thousands_is_finite_and_exact(golden):
    arrays = golden("fedmargin_proposed")
    end = golden_round(arrays, scale=1000.0, temperature=100.0, **RAW)
    both = [10 * arrays[f"hypothesis_{name}"] for name in ("lpm", "apm")]
    want = sum(np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in both) / 2
    got = end.servers[0].variables["params"]["attention"]
    close(got, want, rtol=1e-3, atol=1e-6)


# --- Whole rounds


def plain_prototypes(features, y, *, normalize):
    if normalize:
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
    return {c: features[y == c].mean(0) for c in set(y.tolist())}


def plain_displacement(p, q):
    return np.mean([np.linalg.norm(p[c] - q[c]) for c in p.keys() & q.keys()])


def plain_training(body, head, x, y, steps):
    for _ in range(steps):
        logits = x @ body @ head
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        p /= len(y)
        body, head = body - 0.1 * x.T @ p @ head.T, head - 0.1 * (x @ body).T @ p
    return body, head


def plain_aggregate(sets, labels):
    classes = {c for p in sets for c in p}
    number = lambda y, c: (y == c).sum()
    return {
        c: sum(number(y, c) * p[c] for p, y in zip(sets, labels, strict=True) if c in p)
        / sum(number(y, c) for y in labels)
        for c in classes
    }


def plain_rounds(
    arrays, rounds, *, temperature, normalize_features, prototype_momentum
):
    """FedMargin in numpy, client after client: -> (body, head, aggregate)."""
    of = partial(plain_prototypes, normalize=normalize_features)
    data = [(arrays[f"x{k}"], arrays[f"y{k}"]) for k in range(3)]
    labels = [y for _, y in data]
    body, head = first_variables()["params"].values()
    aggregate = plain_aggregate([of(x @ body, y) for x, y in data], labels)
    for r in range(rounds):
        pairs = zip(data, arrays["tau"], strict=True)
        ends = [plain_training(body, head, *d, t) for d, t in pairs]
        before = [of(x @ body, y) for x, y in data]
        after = [of(x @ e[0], y) for e, (x, y) in zip(ends, data, strict=True)]
        pairs = zip(after, before, strict=True)
        lpm = np.array([plain_displacement(*p) for p in pairs])
        apm = np.array([plain_displacement(p, aggregate) for p in after])
        power = [np.exp(m / temperature) for m in (lpm, apm)]
        attention = sum(p / p.sum() for p in power) / 2
        body, head = (
            np.tensordot(attention, x, 1)
            for x in map(np.stack, zip(*ends, strict=True))
        )
        keep, old = (prototype_momentum if r else 0.0), aggregate
        aggregate = plain_aggregate(after, labels)
        aggregate = {c: keep * old[c] + (1 - keep) * aggregate[c] for c in old}
    return body, head, aggregate


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "normalize_features": True, "prototype_momentum": 0.0},
        {"temperature": 0.1, "normalize_features": False, "prototype_momentum": 0.3},
    ],
    ids=["default", "raw"],
)
def test_rounds_equal_a_plain_loop(golden, options):
    arrays = golden("fl_rounds")
    local = LocalTraining(linear_loss, sgd(), RATE)
    with jax.enable_x64(True):
        end = play_golden(
            arrays,
            fedmargin(local, model=LINEAR, **options),
            variables=first_variables(),
            rounds=3,
        )
    body, head, aggregate = plain_rounds(arrays, 3, **options)
    server = end.servers[-1]
    # The server keeps its prototypes in float32.
    near = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    near(server.variables["params"]["body"], body)
    near(server.variables["params"]["head"], head)
    near(server.prototypes.mean, np.stack([aggregate[c] for c in range(3)]))


def test_prototypes_are_of_the_running_statistics_and_not_of_a_batch():
    """Before training with those of the server, after it with the client's own."""

    def features(variables, x, train):
        mean = x.mean(0) if train else variables["batch_stats"]["mean"]
        found = x - mean[None]
        logits = found @ variables["params"]["head"]["kernel"]
        return logits, found, {"mean": mean}

    model = Model(
        lambda key: norm_variables(), None, (16,), 3, apply_with_features=features
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(1.0, 1.0, (12, 16)).astype("f4"), np.arange(12) % 3
    algorithm = fedmargin(
        LocalTraining(norm_loss, sgd(), RATE), model=model, normalize_features=False
    )
    end = replay(algorithm, ([x], [y]), norm_variables(), tau=[2])
    server = end.servers[0]
    mean = server.variables["batch_stats"]["mean"]
    np.testing.assert_allclose(mean, 0.19 * x.mean(0), rtol=1e-5)
    of = partial(plain_prototypes, y=y, normalize=False)
    before, after = of(x), of(x - mean)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    near(server.prototypes.mean, np.stack([after[c] for c in range(3)]))
    for name in ("lpm", "apm"):  # the first aggregate is that of before
        near(end.metrics[name], [plain_displacement(after, before)])


def test_without_a_temperature_clients_count_equally(golden):
    """T to infinity is FairAvg."""
    arrays = golden("fl_rounds")
    features = lambda variables, x, train: (x, x, {})
    model = Model(lambda key: {}, None, (5,), 3, apply_with_features=features)
    with jax.enable_x64(True):
        algorithm = fedmargin(LOCAL, model=model, temperature=2e9)
        end = play_golden(arrays, algorithm)
    close(flat(end.servers[0].variables), arrays["fairavg"])


# --- Pixels, and what is refused


def test_pixels_count_for_the_class_of_their_nearest_label():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 2, 4, 6)).astype(np.float32)
    labels = rng.integers(0, 4, (3, 6, 8))
    labels[rng.random(labels.shape) < 0.3] = 255  # no class
    features[:2][labels[:2, ::3, ::2] == 255] = np.nan
    features[2] = np.nan  # padding
    is_valid = np.array([True, True, False])

    @jax.jit
    def of(features, labels):
        found = prototypes.class_means(features, labels, is_valid, 5)
        return prototypes.prototype_of_class(*found)

    got = jax.device_get(of(features, labels.astype(np.int32)))
    small = labels[:2, ::3, ::2]
    for c in range(5):
        mine = features[:2][small == c]
        want = mine.mean(0) if len(mine) else np.zeros(6)
        np.testing.assert_allclose(got.mean[c], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.number[c] * 2, len(mine), rtol=1e-6)


def test_a_class_that_is_not_seen_keeps_its_prototype():
    old = Prototypes(np.ones((3, 2), np.float32), np.float32([1, 0, 1]))
    new = Prototypes(np.full((3, 2), 3, np.float32), np.float32([1, 1, 0]))
    update = jax.jit(lambda *given: prototypes.update_prototypes(*given, 0.5))
    moved = jax.device_get(update(old, new))
    close(moved.mean[:, 0], [2.0, 3.0, 1.0])
    assert (moved.number > 0).all()
