"""Which leaves a row means, what does not move, and the losses of MOON and FedAwS."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.personal import batch_norms
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.models.frozen import (
    moving_variables,
    whole_variables,
    with_frozen,
)
from fedfr_jax.models.heads import with_projection
from fedfr_jax.tasks.classification import cross_entropy
from fedfr_jax.tasks.methods import Leaves, with_contrastive_loss
from fedfr_jax.tasks.trainers import select_leaves
from fedfr_jax.trees import by_name, matching
from fedfr_jax.types import Dataset, LocalTraining, Model
from tests.federated import toys

RESNET = MODELS["resnet"]((8, 8, 1), num_classes=3, blocks=(1, 1), widths=(4, 8))
MLP = MODELS["mlp"]((4, 4, 1), hidden_dim=6, num_classes=3)


def chosen(model, given):
    """Paths of the leaves that `given` selects."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    given = Leaves(**given) if isinstance(given, dict) else given
    where = select_leaves(model, given)
    select = matching(where) if isinstance(where, str) else where
    mask = by_name(select(variables))
    return {path for path, is_found in mask.items() if is_found}, variables


def test_batch_norms_are_told_by_their_statistics_wherever_they_are():
    found, variables = chosen(RESNET, {"batch_norms": True})
    names = by_name(variables)
    # Every vector but the last layer's, "shortcut" too, which a search for bn may miss.
    vectors = {n for n in names if n.endswith(("/scale", "/bias", "/mean", "/var"))}
    assert found == vectors - {"params/fc/bias"}
    assert "params/stage2/block1/shortcut/bn/scale" in found
    renamed = {k: {"a": v["stem"]["bn"]} for k, v in variables.items()}
    assert all(jax.tree.leaves(batch_norms(renamed)))


def test_lg_fedavg_keeps_what_fedper_sends():
    sent, variables = chosen(RESNET, {"all_but_blocks": 2})
    kept, _ = chosen(RESNET, {"blocks": 2})
    assert kept and sent and not kept & sent
    assert len(kept | sent) == len(jax.tree.leaves(variables))


def test_frozen_params_stay_under_decay_and_momentum():
    local = LocalTraining(cross_entropy(MLP), sgd(momentum=0.9, weight_decay=0.1), 0.1)
    before = MLP.init(jax.random.key(0))
    model = with_frozen(MLP, "params/classifier", before)
    part = steps_of(
        local._replace(loss=cross_entropy(model)), moving_variables(model, before)
    )
    after = whole_variables(model, part)
    free = steps_of(local, before)
    still, moved = after["params"]["classifier"], after["params"]["fc"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, still, before["params"]["classifier"])
    assert np.abs(moved - before["params"]["fc"]["kernel"]).max() > 1e-3
    assert np.abs(moved - free["params"]["fc"]["kernel"]).max() > 1e-5


def examples(number=12, shape=(4, 4, 1)):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(number, *shape)).astype(np.float32)
    return Dataset.from_arrays(images, (np.arange(number) % 3).astype(np.int32))


def simulated(algorithm, table, offsets):
    classes = np.full(len(offsets) - 1, 3, np.int32)
    population = Population(np.array(offsets), classes)
    feed = Batching(8, shuffle=False)
    return build_simulation(algorithm, feed, table, population, mesh=make_mesh(1))


def steps_of(local, variables):
    """The network after an epoch of one client."""
    sim = simulated(ALGORITHMS["fedavg"](local), examples(), [0, 12])
    return toys.play(sim, variables).server.variables


def told_apart():
    """A network whose features are an image's row: own, of GLOBAL or of PREVIOUS."""

    def features(variables, x, train=False, key=None):
        del key
        which = variables["params"]["which"]
        fixed = (x[:, 1:, :, 0] * which[None, :, None]).sum(1)
        seen = x[:, 0, :, 0] * which.sum() if train else fixed
        return seen[:, :2], seen, variables["batch_stats"]

    def apply(variables, x, train=False, key=None):
        logits, _, stats = features(variables, x, train, key)
        return logits, stats

    return Model(None, apply, (3, 4, 1), 2, apply_with_features=features)


def test_a_round_of_moon_has_the_official_term(golden):
    want = golden("moon_loss")
    images = np.stack([want["z"], want["z_global"], want["z_prev"][0]], axis=1)
    labels = np.arange(len(images), dtype=np.int32) % 2
    table = Dataset.from_arrays(images[..., None].astype(np.float32), labels)
    loss = with_contrastive_loss(cross_entropy, told_apart(), contrastive_weight=5.0)
    sim = simulated(
        ALGORITHMS["moon"](LocalTraining(loss, sgd(), 0.01)), table, [0, len(images)]
    )
    network = lambda *which: {"params": {"which": jnp.array(which)}, "batch_stats": {}}
    server = start_simulation(sim, network(1.0, 0.0))
    store = open_store(sim, server)
    previous = jax.tree.map(lambda x: x[None], jax.device_get(network(0.0, 1.0)))
    store.scatter(np.array([0]), previous, 0)
    (outcome,) = toys.play_rounds(sim, server, first=1, store=store).logs
    found = {name: values[0] for name, values in outcome.metrics.items()}
    np.testing.assert_allclose(
        found["contrastive_loss"], want["loss_one_prev"], rtol=1e-6
    )
    logits = want["z"][:, :2]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropy = -log_p[np.arange(len(labels)), labels].mean()
    total = entropy + 5 * want["loss_one_prev"]
    np.testing.assert_allclose(found["loss"], total, rtol=1e-5)


def test_moon_without_weight_is_fedavg_and_clients_keep_what_they_trained():
    variables, table, ends = MLP.init(jax.random.key(0)), examples(), {}
    plain = LocalTraining(cross_entropy(MLP), sgd(), 0.1)
    near = plain._replace(
        loss=with_contrastive_loss(cross_entropy, MLP, contrastive_weight=0.0)
    )
    for name, local in (("fedavg", plain), ("moon", near)):
        sim = simulated(ALGORITHMS[name](local), table, [0, 5, 12])
        end = toys.play(sim, variables, 2)
        ends[name] = end.server.variables, end.rows
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, ends["moon"][0], ends["fedavg"][0])
    kept = ends["moon"][1]
    mean = jax.tree.map(lambda x: np.average(x, axis=0, weights=[5, 7]), kept)
    jax.tree.map(close, ends["moon"][0], mean)


def test_a_projection_is_between_the_features_and_the_classifier():
    model = with_projection(MLP, projection=5)
    assert model.blocks == ("fc", "projection", "classifier")
    variables = model.init(jax.random.key(1))
    params, images = variables["params"], examples().images

    @jax.jit
    def run(variables):
        logits, projected, _ = model.apply_with_features(variables, images)
        return logits, projected, model.apply(variables, images)[0]

    logits, projected, again = run(variables)
    np.testing.assert_array_equal(again, logits)
    inner = {"fc": params["fc"], "classifier": MLP.init(jax.random.key(0))["params"]}
    inner["classifier"] = inner["classifier"]["classifier"]
    hidden = jax.jit(lambda x: MLP.apply_with_features(x, images)[1])(
        {**variables, "params": inner}
    )
    layer = lambda p, x: x @ np.asarray(p["kernel"]) + np.asarray(p["bias"])[None]
    middle = np.maximum(layer(params["projection"]["hidden"], hidden), 0)
    want = layer(params["projection"]["out"], middle)
    assert want.shape == (12, 5)
    np.testing.assert_allclose(projected, want, rtol=1e-5, atol=1e-6)
    want = layer(params["classifier"], want)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
