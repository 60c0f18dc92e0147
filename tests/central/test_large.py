"""A deep network with 100,000 classes: eight devices take the step that one takes."""

import jax
import numpy as np
import optax
import pytest

from fedfr_jax import mesh as meshes
from fedfr_jax.central.class_parallel import rows_per_device
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.sharding import StepSharding, group_mean, group_size
from fedfr_jax.data.batching import Batching
from fedfr_jax.losses.margin_losses import cosface
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.norm import StatsGroup, stats_over_group
from fedfr_jax.tasks.faces.public_classes import class_parallel_loss
from fedfr_jax.types import Dataset

NUM_CLASSES, BATCH, DIM, CHUNK = 100_000, 16, 32, 4096
WIDTHS = (8, 16, 32, 64)
RULES = (("^phi$", "classes"), ("kernel", "zero3"))


def after_a_step(num_devices):
    """(variables without padding, loss, parts of the table) after a step."""
    model = iresnet((16, 16, 3), depth=50, widths=WIDTHS, embedding_dim=DIM, remat=True)
    backbone = model.init(jax.random.key(0))
    size = group_size(True, num_devices)
    model = stats_over_group(model, StatsGroup(size, group_mean(size, num_devices)))
    loss = class_parallel_loss(model, cosface(), chunk=CHUNK)
    rows = num_devices * rows_per_device(NUM_CLASSES, num_devices, CHUNK)
    table = 0.01 * jax.random.normal(jax.random.key(1), (rows, DIM))
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, 16, 16, 3)).astype(np.float32)
    labels = random.integers(NUM_CLASSES, size=BATCH).astype(np.int32)
    epochs = build_epochs(
        loss,
        optax.sgd(0.01),
        Batching(BATCH),
        make_mesh(num_devices),
        first_row=0,
        num_rows=BATCH,
        seed=0,
        spread=StepSharding(RULES, num_classes=NUM_CLASSES),
    )
    params = {"backbone": backbone["params"], "phi": table}
    state = epochs.init({**backbone, "params": params})
    state, metrics = epochs.run(state, Dataset.from_arrays(images, labels), 0)
    phi = state.variables["params"]["phi"]
    shapes = {shard.data.shape for shard in phi.addressable_shards}
    found = meshes.fetch(state.variables)
    found["params"]["phi"] = found["params"]["phi"][:NUM_CLASSES]
    return found, metrics["loss"], shapes


@pytest.mark.slow
def test_a_deep_network_and_100_000_classes_on_eight_devices_as_on_one():
    one, loss, _ = after_a_step(1)
    eight, same, shapes = after_a_step(8)
    assert shapes == {(4 * CHUNK, DIM)}
    np.testing.assert_allclose(same, loss, rtol=1e-5)
    assert loss > np.log(NUM_CLASSES)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    jax.tree.map(close, eight, one)
