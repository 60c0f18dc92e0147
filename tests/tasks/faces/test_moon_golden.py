"""The row `moon` in a round of the engine: the official loss of given features."""

import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Dataset, Model
from tests.federated import toys
from tests.tasks.faces import given

GLOBAL, PREVIOUS = np.float32([1, 0]), np.float32([0, 1])  # networks' only parameter


def network(dim):
    """An image's rows are its features: of the local, global and previous network.

    The one in training is told by its mode, the frozen two by their parameter.
    """

    def apply(variables, x, train, key=None):
        which = variables["params"]["which"]
        training, frozen = x[:, 0, :, 0], x[:, 1:, :, 0]
        picked = (frozen * which[None, :, None]).sum(1)
        return training * which.sum() if train else picked, variables["batch_stats"]

    previous = {"params": {"which": jnp.asarray(PREVIOUS)}, "batch_stats": {}}
    return Model(lambda key: previous, apply, (3, dim, 1), dim)


def test_a_client_of_the_row_moon_has_the_official_loss(golden):
    """Among another client's rows, shuffled and padded to a batch of eight."""
    want = golden("moon_loss")
    own = np.stack([want["z"], want["z_global"], want["z_prev"][0]], axis=1)[..., None]
    count, _, dim, _ = own.shape
    other = np.random.default_rng(0).normal(size=(3, *own.shape[1:]))
    images = np.concatenate([other, own]).astype(np.float32)
    method = given.method_of(
        network(dim),
        num_classes=2,
        num_clients=2,
        learning_rate=0.01,
        use_public_data=False,
        branch=None,
        contrastive_weight=5.0,
        initial_previous_model="random",
    )
    sim = build_simulation(
        method.algorithm,
        Batching(8),
        Dataset.from_arrays(images, np.arange(3 + count, dtype=np.int32) % 2),
        Population(np.array([0, 3, 3 + count]), np.full(2, 2, np.int32)),
        mesh=make_mesh(1),
    )
    variables = {"params": {"which": jnp.asarray(GLOBAL)}, "batch_stats": {}}
    start = method.init_variables(variables, jnp.zeros((1, dim)))
    metrics = toys.play(sim, start).logs[0].metrics
    assert metrics["steps"].tolist() == [1, 1]
    found = metrics["contrastive_loss"]
    np.testing.assert_allclose(found[1], want["loss_one_prev"], rtol=1e-6)
    assert abs(found[0] - found[1]) > 1e-3
    total = metrics["classification_loss"] + 5 * found
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)
