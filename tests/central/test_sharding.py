"""A step spread over eight devices is the step of one device, in less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax import mesh as meshes
from fedfr_jax.central.class_parallel import rows_per_device
from fedfr_jax.central.epochs import build_epochs, state_shapes
from fedfr_jax.central.optimizers import OPTIMIZERS
from fedfr_jax.central.sharding import StepSharding
from fedfr_jax.central.step import State, build_step
from fedfr_jax.losses.margin import cosine, is_label, softmax_cross_entropy
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import iresnet
from fedfr_jax.types import Batch, Dataset
from tests.central import classes
from tests.central.classes import BATCH, DIM, LOSS, NUM_CLASSES, embed

pytestmark = pytest.mark.ci

TABLE = (("^phi$", "classes"),)
ALONE = StepSharding()
KEY = jax.random.key(0)
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.05),  # of a gradient that lies on several devices
    optax.add_decayed_weights(0.01),
    optax.sgd(0.1, 0.9),
)


def dense_loss(variables, batch, key):
    """The same loss with the whole table, by hand."""
    del key
    features, _ = embed({"params": variables["params"]["backbone"]}, batch.images)
    found = cosine(features, variables["params"]["phi"][:NUM_CLASSES])
    found = found - 0.2 * is_label(batch.labels, NUM_CLASSES).astype(jnp.float32)
    return softmax_cross_entropy(8.0 * found, batch.labels).mean()


def epochs_of(num_devices, loss, step_sharding, optimizer=OPTIMIZER, **settings):
    trainer = classes.trainer(num_devices, **settings)._replace(loss=loss)
    return build_epochs(
        trainer,
        make_mesh(num_devices),
        0,
        optimizer=optimizer,
        step_sharding=step_sharding,
    )


def train(num_devices, loss, step_sharding=ALONE, epochs=1, **options):
    """(state, metrics) after epochs of two steps."""
    run = epochs_of(num_devices, loss, step_sharding, **options)
    state, table = run.init(classes.variables(num_devices)), classes.data()
    for epoch in range(epochs):
        state, metrics = run.run(state, table, epoch)
    return state, metrics


def without_padding(state):
    params = dict(jax.device_get(state.variables["params"]))
    return {**params, "phi": params["phi"][:NUM_CLASSES]}


def close(actual, expected, tolerance=2e-5):
    one = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    jax.tree.map(one, actual, expected)


@pytest.fixture(scope="module")
def expected():
    state, metrics = train(1, dense_loss)
    return without_padding(state), metrics["loss"]


@pytest.mark.parametrize("rule", ["zero1", "zero2", "zero3"])
def test_eight_devices_train_as_one_however_the_state_is_cut(rule, expected):
    rules = (*TABLE, ("bias", "whole"), ("backbone", rule))
    step_sharding = StepSharding(rules, num_classes=NUM_CLASSES, micro_batches=2)
    state, metrics = train(8, LOSS, step_sharding)
    close((without_padding(state), metrics["loss"]), expected)
    parts = lambda x: len({str(s.index) for s in x.addressable_shards})
    *_, (trace, _) = state.opt_state
    params, trace = state.variables["params"], trace.trace
    assert parts(params["phi"]) == parts(trace["phi"]) == 8
    assert parts(trace["backbone"]["last"]) == 8
    assert parts(params["backbone"]["last"]) == (8 if rule == "zero3" else 1)
    assert parts(trace["backbone"]["bias"]) == 1


def test_lars_has_the_norms_of_whole_leaves_however_they_are_cut():
    lars = OPTIMIZERS["lars"](3.0, 0.01)
    alone, _ = train(1, dense_loss, optimizer=lars)
    rules = (*TABLE, ("backbone", "zero3"))
    step_sharding = StepSharding(rules, num_classes=NUM_CLASSES, micro_batches=2)
    cut, _ = train(8, LOSS, step_sharding, optimizer=lars)
    close(without_padding(cut), without_padding(alone))
    start, end = classes.variables()["params"], alone.variables["params"]
    for name in ("first", "last"):  # far enough for another norm to show
        assert np.abs(end["backbone"][name] - start["backbone"][name]).max() > 1e-3


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_lars_moves_each_class_by_its_own_norm_whatever_rows_lie_beside_it(rate):
    lars, mesh = OPTIMIZERS["lars"](3.0, 0.0), make_mesh(8)
    step_sharding = StepSharding(TABLE, num_classes=NUM_CLASSES, class_rate=rate)
    state = epochs_of(8, LOSS, step_sharding, optimizer=lars).init(classes.variables(8))
    first = jax.device_get(state.variables["params"]["phi"])
    step = jax.jit(build_step(LOSS, lars, mesh, step_sharding))
    after, _ = step(state, batch_of(classes.data(), mesh), KEY)
    moved = np.linalg.norm(after.variables["params"]["phi"] - first, axis=1)
    is_moved = moved > 0
    norms = np.linalg.norm(first, axis=1)
    np.testing.assert_allclose(moved[is_moved], 3e-3 * norms[is_moved], rtol=1e-3)
    assert not is_moved[NUM_CLASSES:].any()
    assert 30 < is_moved.sum() <= NUM_CLASSES


def compiled(num_devices, rule, **options):
    """The step of a network of 4 MiB, whose class table is small."""
    step_sharding = StepSharding(
        (*TABLE, ("backbone", rule)), num_classes=NUM_CLASSES, **options
    )
    mesh = make_mesh(num_devices)
    variables = classes.variables(num_devices, width=2**14)
    state = epochs_of(num_devices, LOSS, step_sharding).init(variables)
    batch = batch_of(classes.data(), mesh)
    step = jax.jit(build_step(LOSS, OPTIMIZER, mesh, step_sharding), donate_argnums=0)
    return step.lower(state, batch, jax.random.key(0))


def batch_of(data, mesh):
    cut = lambda x: meshes.put_global(x[:BATCH], meshes.over_clients(mesh))
    numbers = np.arange(BATCH, dtype=np.int32)
    always = np.ones(BATCH, bool)
    inputs, targets = jax.tree.map(cut, (data.inputs, data.targets))
    rest = map(cut, (always, always, numbers, numbers, numbers))
    return Batch(inputs, targets, jnp.int32(0), *rest)


def test_zero_3_keeps_a_part_of_the_state_on_each_device():
    sizes = {n: compiled(n, "zero3").compile().memory_analysis() for n in (1, 2, 8)}
    state = sizes[1].argument_size_in_bytes
    assert state > 2 * 4 * 2**14 * (DIM + 12)  # parameters and momentum
    for n, size in sizes.items():
        assert abs(size.argument_size_in_bytes * n / state - 1) < 0.05


def test_gradients_are_scattered_and_summed_in_bfloat16_when_asked():
    texts = {
        (rule, dtype): compiled(8, rule, reduce_dtype=dtype).as_text()
        for rule, dtype in [("zero1", None), ("zero2", None), ("zero3", "bfloat16")]
    }
    sums = lambda text, kind: re.findall(
        rf"stablehlo\.{kind}.*?\) : \((.*?)\) ->", text, re.DOTALL
    )
    whole = f"{2**14}x{DIM}x"
    scattered = {k: " ".join(sums(t, "reduce_scatter")) for k, t in texts.items()}
    assert whole not in scattered["zero1", None]
    assert f"{whole}f32" in scattered["zero2", None]
    assert f"{whole}bf16" in scattered["zero3", "bfloat16"]
    assert f"{whole}f32" not in scattered["zero3", "bfloat16"]


def test_a_rule_that_matches_nothing_names_near_ones():
    step_sharding = StepSharding((("backbone/fist", "zero3"),))
    with pytest.raises(ValueError, match="must match a leaf such as backbone/first"):
        epochs_of(8, dense_loss, step_sharding).init(classes.variables(8))


def test_rows_that_are_not_drawn_keep_their_bits_and_their_momentum():
    step_sharding = StepSharding(TABLE, num_classes=NUM_CLASSES, class_rate=0.1)
    mesh = make_mesh(8)
    data = classes.data()
    data = data.with_labels(data.labels % 5)
    state = epochs_of(8, LOSS, step_sharding).init(classes.variables(8))
    trace = state.opt_state[2][0].trace
    first = jax.device_get((state.variables["params"]["phi"], trace["phi"]))
    step = jax.jit(build_step(LOSS, OPTIMIZER, mesh, step_sharding))
    after, _ = step(state, batch_of(data, mesh), jax.random.key(1))
    trace = after.opt_state[2][0].trace
    last = jax.device_get((after.variables["params"]["phi"], trace["phi"]))
    is_moved = (first[0] != last[0]).any(1)
    assert is_moved[:5].all() and 8 <= is_moved.sum() <= 8 + 5  # one drawn on each
    np.testing.assert_array_equal(first[0][~is_moved], last[0][~is_moved])
    np.testing.assert_array_equal(first[1][~is_moved], last[1][~is_moved])
    assert (last[1][is_moved] != 0).any(1).all()


def test_the_rate_of_drawn_classes_is_a_schedule_and_each_is_compiled_once():
    traced = []

    def loss(variables, batch, key, *, held):
        traced.append(len(held.ids))
        return LOSS(variables, batch, key, held=held)

    step_sharding = StepSharding(TABLE, num_classes=NUM_CLASSES)
    state, _ = train(8, loss, step_sharding, epochs=4, class_sample_rate=(0.2, 1.0))
    per_device = rows_per_device(NUM_CLASSES, 8)
    assert traced == [2 + BATCH, per_device] and per_device == 9
    assert np.isfinite(without_padding(state)["phi"]).all()


def of_blocks(rule, remat, dtype=None, **options):
    """(lowered step of a network of equal blocks, its arguments)."""
    model = iresnet(
        (4, 4, 3), blocks=(5,), widths=(32,), embedding_dim=8, remat=remat, dtype=dtype
    )

    def loss(variables, batch, key):
        del key
        output, stats = model.apply(variables, batch.images, True)
        return jnp.mean(output[:, 0] * batch.labels), (stats, {})

    step_sharding = StepSharding((("kernel", rule),), **options)
    mesh, optimizer = make_mesh(8), optax.sgd(0.1)
    start = model.init(jax.random.key(0))
    specs = state_shapes(start, optimizer, mesh, step_sharding)
    at = jax.tree.map(lambda x: x.sharding, specs)
    state = jax.device_put(State(start, optimizer.init(start["params"])), at)
    images = np.random.default_rng(0).normal(size=(BATCH, 4, 4, 3)).astype(np.float32)
    batch = batch_of(
        Dataset.from_arrays(images, np.arange(BATCH, dtype="float32")), mesh
    )
    step = build_step(loss, optimizer, mesh, step_sharding)
    run = jax.jit(lambda state, batch: step(state, batch, KEY)[0])
    return run.lower(state, batch), (state, batch)


@pytest.mark.parametrize("remat", [True, False])
def test_zero_3_gathers_a_block_where_it_runs_if_blocks_are_computed_again(remat):
    ends, texts = {}, {}
    for rule in ("whole", "zero3"):
        program, arguments = of_blocks(rule, remat)
        ends[rule] = jax.device_get(program.compile()(*arguments))
        texts[rule] = program.as_text()
    close(ends["zero3"].variables, ends["whole"].variables, 1e-4)
    found = re.findall(r"all_gather.*?-> tensor<(.*?)>", texts["zero3"], re.DOTALL)
    assert "3x3x32x32xf32" in found  # of the first block in any case
    assert ("4x3x3x32x32xf32" in found) != remat


def dtypes_gathered(program):
    """Dtypes of kernels that are all-gathered in a lowered program.

    XLA:CPU moves no bfloat16 between devices, so that a compiled one does not say it.
    """
    found = re.findall(
        r"all_gather.*?-> tensor<([\dx]+)x(\w+)>", program.as_text(), re.DOTALL
    )
    return {dtype for shape, dtype in found if shape.endswith("3x3x32x32")}


@pytest.mark.parametrize("rule", ["zero2", "zero3"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gathers_in_bfloat16_change_nothing_of_a_network_in_bfloat16(
    rule, micro_batches
):
    settings = {"dtype": "bfloat16", "micro_batches": micro_batches}
    whole, arguments = of_blocks("whole", True, **settings)
    cut, cut_arguments = of_blocks(rule, True, gather_dtype="bfloat16", **settings)
    assert dtypes_gathered(cut) == {"bf16"}
    start = arguments[0].variables["params"]
    expected = whole.compile()(*arguments).variables["params"]
    params = cut.compile()(*cut_arguments).variables["params"]
    kernel = params["stage1"]["block[2:6]"]["conv1"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size

    def equal_steps(start, end, expected):
        step = expected - start
        atol = 1e-5 * np.abs(step).max()
        np.testing.assert_allclose(end - start, step, rtol=1e-5, atol=atol)

    jax.tree.map(equal_steps, *map(jax.device_get, (start, params, expected)))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_gathers_stay_in_float32_unless_another_dtype_is_asked_for(dtype):
    program, (state, _) = of_blocks("zero3", True, dtype=dtype)
    assert dtypes_gathered(program) == {"f32"}
    program, (state, _) = of_blocks("zero2", True, dtype=dtype)
    assert dtypes_gathered(program) == set()  # the whole is kept, in float32
    kernel = state.variables["params"]["stage1"]["block[2:6]"]["conv1"]["kernel"]
    assert kernel.is_fully_replicated and kernel.dtype == jnp.float32


def test_frozen_leaves_keep_their_bits_where_classes_are_sharded(tmp_path):
    end = classes.train(tmp_path, 8, frozen="first", epochs=1)["params"]["backbone"]
    start = classes.variables(8)["params"]["backbone"]
    np.testing.assert_array_equal(end["first"], start["first"])
    assert not np.array_equal(end["last"], start["last"])
