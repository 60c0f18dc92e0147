"""How a feed augments: keys of the example's place, and views that can be looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import compose, horizontal_flip, normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.federated.client import SlotInputs, all_rows, client_view
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Augment, Dataset
from tests.federated import toys

COUNT, BATCH = 12, 8
UNCOUNTED = Augment(
    horizontal_flip().apply
)  # the same mirroring, whose views nobody counts


def dataset(count=COUNT):
    """Images whose left half says which row they are, with masks of the same."""
    rows = np.arange(count, dtype=np.uint8)
    images = np.zeros((count, 2, 4, 1), np.uint8)
    images[:, :, :2] = rows[:, None, None, None]
    targets = {"label": rows.astype(np.int32), "mask": images[..., 0]}
    return Dataset({"image": images}, targets)


def of_client(feed, take, shard=(0, 1)):
    """What `take` takes of a client that owns all rows of `dataset`, in one program."""

    @jax.jit
    def run(table):
        slot = jax.tree.map(jnp.int32, SlotInputs(0, 0, 0, 0, COUNT, 0, 2, 4))
        key, extra, start = jax.random.key(0), empty_prepared(1), jnp.int32(0)
        held = all_rows(table)
        return take(
            client_view(feed, COUNT, key, slot, extra, held, start, shard=shard)
        )

    return jax.device_get(run(dataset()))


def batches(feed, *steps, shard=(0, 1)):
    """The batches of these steps."""
    of = lambda client: [client.batch(jnp.int32(step)) for step in steps]
    return of_client(feed, of, shard)


@pytest.mark.parametrize(
    "augment", [horizontal_flip(), compose(normalize(), horizontal_flip())]
)
def test_a_batch_knows_its_views(augment):
    stored, seen = dataset(), []
    views = jax.jit(jax.vmap(augment.apply_view))
    for batch in batches(Batching(BATCH, augment), *range(4)):
        expected = views(batch.view_index, {"image": stored.images[batch.row]})
        np.testing.assert_array_equal(batch.images, expected["image"])
        seen += batch.view_index.tolist()
    assert set(seen) == {0, 1}


def test_a_clients_examples_are_its_rows_and_then_those_of_its_place_in_the_cohort():
    counts = {"num_examples": 5, "num_added": 2, "num_classes": 2, "num_steps": 2}
    slot = SlotInputs(0, cohort_index=1, is_new=0, offset=3, **counts)
    of_place = [[0, 1, 2], [9, 11, 0]]  # the last one only fills up

    @jax.jit
    def batches(table, slot):
        added = {"added_rows": jnp.int32(of_place), "num_added": jnp.int32([3, 2])}
        extra, held = empty_prepared(2)._replace(**added), all_rows(table)
        feed, key = Batching(4, None, shuffle=False), jax.random.key(0)
        client = client_view(feed, 5, key, slot, extra, held, jnp.int32(0))
        return [client.batch(jnp.int32(step)) for step in (0, 1)]

    both = jax.device_get(batches(dataset(), jax.tree.map(np.int32, slot)))
    joined = lambda name: np.concatenate([getattr(batch, name) for batch in both])
    assert joined("row").tolist() == [3, 4, 5, 6, 7, 9, 11, 3]
    assert joined("labels").tolist() == [3, 4, 5, 6, 7, 9, 11, 3]
    assert joined("is_added").tolist() == [False] * 5 + [True, True, False]
    assert joined("is_valid").tolist() == [True] * 7 + [False]


def test_targets_are_moved_with_their_image():
    (batch,) = batches(Batching(BATCH, horizontal_flip()), 0)
    assert batch.view_index.any()
    np.testing.assert_array_equal(batch.targets["mask"], batch.images[..., 0])
    np.testing.assert_array_equal(batch.labels, batch.row)


def test_an_example_is_augmented_by_its_place_in_the_step_alone():
    """The parts of a batch over devices are those of the whole batch."""
    feed = Batching(BATCH, horizontal_flip())
    whole, again = batches(feed, 2, 3)
    parts = [batches(feed, 2, shard=(i, 2))[0] for i in range(2)]
    together = jax.tree.map(lambda *x: np.concatenate(x), *(p.inputs for p in parts))
    np.testing.assert_array_equal(together["image"], whole.images)
    assert not np.array_equal(again.view_index, whole.view_index)


def test_a_span_is_seen_in_the_view_that_is_asked_for():
    stored = dataset().images[:BATCH]
    both = lambda client: [
        client.batch_from(jnp.int32(0), jnp.int32(view)) for view in range(2)
    ]
    spans = of_client(Batching(BATCH, horizontal_flip()), both)
    wanted = stored, stored[:, :, ::-1]
    for view, (batch, expected) in enumerate(zip(spans, wanted, strict=True)):
        np.testing.assert_array_equal(batch.images, expected)
        assert (batch.view_index == view).all()


@pytest.mark.parametrize(
    "augment", [UNCOUNTED, horizontal_flip()._replace(sample_view=None)]
)
def test_without_counted_views_a_span_and_features_are_plain(augment):
    """Chance is left out; what always happens is not."""
    feed = Batching(BATCH, compose(augment, normalize()))
    assert feed.num_views == 0
    expected = dataset().images / np.float32(127.5) - 1
    first = lambda client: client.batch_from(jnp.int32(0), jnp.int32(0))
    span = of_client(feed, first)
    np.testing.assert_allclose(span.images, expected[:BATCH], atol=1e-6)
    embed = lambda variables, images: images.reshape(len(images), -1)
    run = build_embed(embed, feed, make_mesh(1))
    features = run({}, dataset(), np.arange(COUNT, dtype=np.int32))[:COUNT, 0]
    np.testing.assert_allclose(features, expected.reshape(COUNT, -1), atol=1e-6)


def test_inputs_and_targets_of_any_structure_are_streamed():
    """A round of segments gives what the data set gives on the device."""
    rng = np.random.default_rng(0)
    shapes = {"image": (4, 4, 1), "scale": ()}
    count = toys.SIZES.sum()
    inputs = {k: rng.normal(size=(count, *s)) for k, s in shapes.items()}
    inputs = jax.tree.map(np.float32, inputs)
    labels = rng.integers(3, size=count).astype(np.int32)
    targets = {"label": labels, "weight": np.ones(count, np.float16)}
    whole = Dataset(inputs, targets)
    read = lambda rows: jax.tree.map(lambda x: x[rows], inputs)
    streamed = stream(read, targets, waves=1)
    assert streamed.example_bytes == 4 * 16 + 4 + 4 + 2
    assert streamed.num_examples == whole.num_examples == count
    assert streamed.input_shape == whole.input_shape == (4, 4, 1)

    def loss(variables, batch, key):
        scaled = batch.images * batch.inputs["scale"][:, None, None, None]
        weight = batch.targets["weight"].astype(np.float32)[:, None, None, None]
        batch = batch._replace(inputs={"image": scaled * weight})
        return toys.norm_loss(variables, batch, key)

    def learned(table):
        sim = toys.build(toys.fedavg_of(loss), table=table, mesh=(2, 1))
        return toys.play(sim, toys.norm_variables()).server

    toys.assert_close(learned(streamed), learned(whole), 1e-6, 1e-6)
