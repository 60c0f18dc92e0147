"""One network over several devices: the same numbers, in a fraction of the memory."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.convolutions import use_forms
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import model_parallel, parameter_packing
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.models import iresnet
from fedfr_jax.models.small_networks import cnn
from fedfr_jax.types import Dataset
from tests.federated import toys
from tests.tasks.faces import given

pytestmark = pytest.mark.ci

SHAPE, BATCH, PUBLIC, CLASSES = (8, 8, 3), 4, 160, 128
SIZES = np.array([8, 3, 5, 13])  # and as many public images as are similar


def small():
    return iresnet(SHAPE, widths=(32,), blocks=(1,), embedding_dim=32)


def build(num_model_shards, network=small, batch=BATCH, **options):
    """FedFR on a small IResNet, four clients on 2 x `num_model_shards` devices."""
    model = model_parallel.gather(network())
    options = {"learning_rate": 0.01, **options}
    method = given.method_of(model, num_classes=CLASSES, **options)
    random = np.random.default_rng(0)
    count = SIZES.sum() + PUBLIC
    images = random.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int32) % CLASSES
    sim = build_simulation(
        method.algorithm,
        Batching(batch, toys.MIRRORED_BYTES),
        Dataset.from_arrays(images, labels),
        Population(np.r_[0, np.cumsum(SIZES)], np.full(4, CLASSES, np.int32)),
        mesh=meshes.make_mesh(2, num_model_shards),
    )
    phi = jax.random.normal(jax.random.key(2), (PUBLIC, model.embedding_dim))
    backbone = jax.jit(model.init)(jax.random.key(1))
    variables = method.init_variables(
        jax.tree.map(lambda x: x.astype(float), backbone), phi
    )
    return sim, start_simulation(sim, variables)


@functools.cache
def two_rounds(num_model_shards):
    """(server, rows, the compiled round), small leaves packed and nearly all cut.

    In float64, because a hundred steps of an untrained network lead away from each
    other whatever is rounded otherwise.
    """
    everything = mock.patch.object(parameter_packing, "MIN_LEAVES", 1)
    vectors = mock.patch.object(parameter_packing, "MAX_LEAF_SIZE", 1024)
    and_cut = mock.patch.object(model_parallel, "SMALLEST", 64)
    with jax.enable_x64(True), everything, vectors, and_cut:
        return _two_rounds(num_model_shards)


def _two_rounds(num_model_shards):
    sim, server = build(num_model_shards, max_hard_negatives=16)
    whole = sim.programs.run_whole
    compiled = whole.lower(*round_arguments(sim, server)).compile()
    store = open_store(sim, server)
    for round in range(2):
        server, _ = toys.simulate_round(sim, server, store, round)
    assert whole.num_compiled() == 1
    return server, store.gather(np.arange(4))[0], compiled


def test_a_network_over_four_devices_learns_what_one_device_does():
    close = lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-8)
    cut, whole = two_rounds(4), two_rounds(1)
    jax.tree.map(close, cut[:2], whole[:2])


def test_no_operation_of_a_round_waits_for_all_devices_in_a_loop():
    text = two_rounds(4)[2].as_text()
    assert " all-gather(" in text
    assert "collective-permute" not in text


def test_the_server_stays_cut_over_the_model_axis():
    server = two_rounds(4)[0]
    params = given.backbone(server)["params"]
    kernel = params.large["fc"]["kernel"]
    assert kernel.shape == (512 * 32,)
    assert kernel.addressable_shards[0].data.shape == (128 * 32,)
    assert params.small.ndim == 1
    assert not params.small.sharding.is_fully_replicated


def test_a_device_holds_about_a_quarter_between_steps():
    cut, whole = (two_rounds(n)[2].memory_analysis() for n in (4, 1))
    images = (SIZES.sum() + PUBLIC) * (np.prod(SHAPE) + 4)
    lasting = lambda found: found.argument_size_in_bytes - images
    assert lasting(cut) < 0.4 * lasting(whole)
    assert cut.output_size_in_bytes < 0.4 * whole.output_size_in_bytes
    assert cut.temp_size_in_bytes < 0.6 * whole.temp_size_in_bytes


def convolution_rounds(num_model_shards, forms):
    """(server, the compiled round) of two lanes with a narrow and a wide convolution.

    All leaves are small enough to stay whole.
    """
    network = cnn((12, 12, 1), widths=(4, 80), embedding_dim=3)
    model = model_parallel.gather(network)

    def loss(variables, batch, key):
        outputs, stats = model.apply(variables, batch.images, True, key=key)
        misses = jnp.square(outputs - batch.labels[:, None].astype(outputs.dtype))
        return jnp.where(batch.is_valid[:, None], misses, 0).mean(), (stats, {})

    random, count = np.random.default_rng(0), 4 * BATCH
    images = random.normal(size=(count, *network.input_shape)).astype(np.float32)
    labels = random.integers(3, size=count, dtype=np.int32)
    sim = build_simulation(
        toys.fedavg_of(loss),
        Batching(BATCH),
        Dataset.from_arrays(images, labels),
        Population(np.arange(0, count + 1, BATCH), np.full(4, 3, np.int32)),
        Settings(clients_per_device=2),
        mesh=meshes.make_mesh(2, num_model_shards),
    )
    with use_forms(forms):
        server = start_simulation(sim, jax.jit(network.init)(jax.random.key(1)))
        whole = sim.programs.run_whole
        compiled = whole.lower(*round_arguments(sim, server)).compile()
        return toys.play_rounds(sim, server).server, compiled


@pytest.mark.parametrize("forms", ["gpu", "tpu"])
def test_lanes_convolve_the_images_that_a_device_has(forms):
    server, compiled = convolution_rounds(4, forms)
    assert " all-gather(" not in compiled.as_text()
    toys.assert_close(server, convolution_rounds(1, forms)[0], 1e-4, 1e-6)


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((3, 3, 64, 128), (None, None, None, "model")),
        ((7, 3, 3, 64, 64), (None, None, None, None, "model")),  # the last of equals
        ((25088, 512), ("model",)),
        ((6001, 510), ()),  # nothing divides by 4
        ((4095,), ()),  # small
        ((), ()),
    ],
)
def test_the_longest_axis_that_divides_is_cut(shape, spec):
    mesh = meshes.make_mesh(2, 4)
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    assert model_parallel.placement(mesh, leaf).spec == P(*spec)
    rows = jax.ShapeDtypeStruct((2, 3, 1, *shape), np.float32)
    row_spec = P("clients", None, None, *spec)
    assert model_parallel.row_placement(mesh, rows).spec == row_spec
    whole = meshes.make_mesh(8)
    assert model_parallel.placement(whole, leaf).spec == P()


def test_a_batch_that_the_axis_does_not_divide_is_refused():
    mesh = meshes.make_mesh(2, 4)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 4 .* 6"):
        model_parallel.shard_leaves(mesh, None, 6)
