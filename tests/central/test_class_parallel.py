"""Class-parallel margin softmax: the released code's numbers, on any devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.central.class_parallel import (
    SampledClasses,
    all_rows,
    class_losses,
    num_sampled,
    rows_per_device,
    sample_classes,
)
from fedfr_jax.losses.margin_losses import arcface_straight_through, cosface
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.faces.public_classes import build_class_softmax
from tests.federated import toys

CUT, WHOLE = P(meshes.CLIENTS), P()
RULES = {
    "cosface_m04": build_class_softmax(cosface(scale=64.0), {}),
    "arcface_m05": build_class_softmax(arcface_straight_through(scale=64.0), {}),
    "cosface_m04_filter": build_class_softmax(cosface(scale=64.0), {}, None, 0.3),
}
COSFACE = RULES["cosface_m04"]


def gradients(num_devices, num_classes, of, ids=None, mesh=None):
    """(x, table, labels) -> (mean loss, (dx, dtable)), as a step takes them.

    Each device differentiates the mean of its own examples; the sum over the devices is
    their number times the loss.

    Args:
      ids: [devices, R] classes of the rows; None: of all.
    """
    rows = rows_per_device(num_classes, num_devices, of.chunk)

    def held(table):
        if ids is None:
            return all_rows(num_classes, len(table))
        own = jnp.asarray(ids)[jax.lax.axis_index(meshes.CLIENTS)]
        index = own - jax.lax.axis_index(meshes.CLIENTS) * rows
        index = jnp.where(own >= 0, index, rows)
        number = jnp.arange(len(own), dtype=jnp.int32)
        row = jnp.full(rows, -1, jnp.int32).at[index].set(number, mode="drop")
        return SampledClasses(own, row)

    def of_part(x, table, labels):
        def loss(x, table):
            return class_losses(x, table, labels, held(table), of)[0].mean()

        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, table)
        grads = jax.tree.map(lambda g: g / num_devices, grads)
        return jax.lax.pmean(value, meshes.CLIENTS), grads

    specs = (CUT, CUT, CUT), (WHOLE, (CUT, CUT))
    mesh = mesh or make_mesh(num_devices)
    return jax.jit(meshes.over_client_devices(mesh, of_part, *specs))


def padded(w, num_devices, chunk=0):
    """The table as it lies on the devices; the padding is long and in the way."""
    rows = num_devices * rows_per_device(len(w), num_devices, chunk)
    return np.concatenate([w, np.full((rows - len(w), w.shape[1]), 1e3, np.float32)])


def found(num_devices, x, w, labels, *, chunk=0, rule=COSFACE, dtype=None, mesh=None):
    """(loss, dx, dw) on so many devices."""
    of = rule._replace(chunk=chunk, dtype=dtype)
    run = gradients(num_devices, len(w), of, mesh=mesh)
    loss, (dx, dw) = run(x, padded(w, num_devices, chunk), labels)
    np.testing.assert_array_equal(dw[len(w) :], 0)
    return float(loss), np.asarray(dx), np.asarray(dw[: len(w)])


def close(actual, expected, tolerance=2e-5):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def dense_loss(x, w, labels):
    """Mean loss of CosFace with scale 64 and margin 0.4, in float64."""
    unit = lambda a: a / np.linalg.norm(a, axis=1, keepdims=True)
    logits = 64 * unit(np.float64(x)) @ unit(np.float64(w)).T
    logits[np.arange(len(x)), labels] -= 64 * 0.4
    total = np.logaddexp.reduce(logits, axis=1)
    return (total - logits[np.arange(len(x)), labels]).mean()


def problem(num_classes=37, batch=16, seed=0):
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    labels = random.integers(num_classes, size=batch).astype(np.int32)
    return draw(batch, 8), draw(num_classes, 8), labels


@pytest.mark.parametrize(
    "parts, rule",
    toys.others_are_slow(
        {(2, rule) for rule in RULES} | {(1, "cosface_m04"), (4, "arcface_m05")},
        (1, 2, 4),
        RULES,
    ),
)
def test_losses_and_gradients_are_the_released_codes(golden, parts, rule):
    g = golden("bigface_margin")
    labels = g["labels"].astype(np.int32)
    actual = found(parts, g["x"], g["w"], labels, rule=RULES[rule], chunk=3)
    dense = f"{rule}/dense64/"
    # Row 1 points away from its class: the released loss is bounded there.
    assert actual[0] > float(g[f"{rule}/W{parts}/loss"][0])
    close(actual, [g[dense + name] for name in ("loss", "dx", "dw")])
    released = f"{rule}/W{parts}/"
    dx = g[released + "dx_before_ddp_mean"] / parts
    close(actual[1:], [dx, g[released + "dw"]])


def test_chunks_devices_and_the_order_of_classes_change_nothing():
    x, w, labels = problem()
    labels[:3] = 0, 36, 35  # the first, the last before the padding, its neighbor
    expected = found(1, x, w, labels)
    np.testing.assert_allclose(expected[0], dense_loss(x, w, labels), rtol=1e-5)
    for num_devices, chunk in [(8, 0), (8, 2), (2, 7)]:
        close(found(num_devices, x, w, labels, chunk=chunk), expected)
    order = np.random.default_rng(1).permutation(len(w))
    loss, dx, dw = found(4, x, w[order], np.argsort(order)[labels].astype(np.int32))
    close((loss, dx, dw), (expected[0], expected[1], expected[2][order]))


def test_a_label_of_padding_has_no_class_as_minus_1_has_none():
    """Neither may move the padding, which `found` looks at."""
    x, w, labels = problem()  # 37 classes, five rows on each of eight devices
    labels[:2] = -1
    expected = found(8, x, w, labels)
    labels[:2] = 37, 39
    close(found(8, x, w, labels), expected, tolerance=0)


def drawn_on(num_devices, labels, num_classes, rate, seed=0):
    """(ids [devices, R], row [devices, c]) of a draw."""
    rows = rows_per_device(num_classes, num_devices)
    count = num_sampled(rows, rate)

    def of_part(labels):
        key = jax.random.key(seed)
        held = sample_classes(key, labels, num_classes, rows, count)
        return jax.tree.map(lambda x: x[None], held)

    draw = meshes.over_client_devices(make_mesh(num_devices), of_part, (WHOLE,), CUT)
    return jax.device_get(jax.jit(draw)(labels))


def test_a_draw_holds_every_label_once_and_as_many_others_as_asked():
    _, _, labels = problem(num_classes=101, batch=24)
    held = drawn_on(4, labels, 101, rate=0.3)  # 26 rows a device, 8 of them
    kept = held.ids[held.ids >= 0]
    assert len(set(kept)) == len(kept) and set(labels) <= set(kept)
    for device, (ids, row) in enumerate(zip(*held, strict=True)):
        own = ids[ids >= 0]
        assert set(own // 26) <= {device} and (own < 101).all()
        assert 8 <= len(own) <= 8 + len(set(labels[labels // 26 == device]))
        np.testing.assert_array_equal(
            ids[row[row >= 0]] - 26 * device, *np.where(row >= 0)
        )
    others = [drawn_on(4, labels, 101, 0.3, seed).ids.tolist() for seed in (0, 1)]
    assert others[0] == held.ids.tolist() and others[1] != others[0]


@pytest.mark.parametrize(
    "case, parts", [("W1_r0.6", 1), ("W2_r0.8", 2), ("W1_r0.2", 1)]
)
def test_a_sampled_loss_is_the_released_codes(golden, case, parts):
    """The classes that the released code drew; its devices have 7 and 6, as ours."""
    g = golden("bigface_margin")
    of = COSFACE
    counts = np.cumsum(g[f"pfc/{case}/sampled_per_rank"])[:-1]
    parts_of = np.split(g[f"pfc/{case}/sampled_ids"], counts)
    most = max(map(len, parts_of))
    fill = lambda ids: np.pad(ids, (0, most - len(ids)), constant_values=-1)
    ids = np.stack([fill(part) for part in parts_of]).astype(np.int32)
    rows = g["w"][np.maximum(ids, 0)].reshape(-1, 16)
    run = gradients(parts, 13, of, ids)
    loss, (dx, dw) = run(g["x"], rows, g["labels"].astype(np.int32))
    dense = np.zeros((13, 16), np.float32)
    is_real = ids.ravel() >= 0
    dense[ids.ravel()[is_real]] = np.asarray(dw)[is_real]
    close(
        [dx, dense], [g[f"pfc/{case}/dx_before_ddp_mean"] / parts, g[f"pfc/{case}/dw"]]
    )
    kept = np.sort(ids[ids >= 0])
    own = np.searchsorted(kept, g["labels"])
    np.testing.assert_allclose(loss, dense_loss(g["x"], g["w"][kept], own), rtol=1e-5)
    # Row 1's loss is above the released bound.
    assert float(loss) > float(g[f"pfc/{case}/loss"][0])


def test_a_draw_of_all_classes_is_the_whole_softmax():
    x, w, labels = problem()
    held = drawn_on(4, labels, len(w), rate=1.0)
    table = padded(w, 4)
    rows = table[np.maximum(held.ids, 0)].reshape(-1, 8)
    of = COSFACE
    loss, (dx, _) = gradients(4, len(w), of, held.ids)(x, rows, labels)
    close((loss, dx), found(4, x, w, labels)[:2])


def compiled(num_devices, chunk, num_classes=2048, batch=64, dim=16):
    of = COSFACE._replace(chunk=chunk)
    shapes = (batch, dim), (num_classes, dim), (batch,)
    kinds = jnp.float32, jnp.float32, jnp.int32
    mesh = make_mesh(num_devices)
    args = [
        jax.ShapeDtypeStruct(shape, kind, sharding=meshes.over_clients(mesh))
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    return gradients(num_devices, num_classes, of).lower(*args).compile()


def test_only_features_and_numbers_per_example_are_moved():
    """B x D floats to all devices and back; a class table would be 128 KiB."""
    moved = {}
    text = compiled(8, chunk=32).as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for shapes, kind in re.findall(rf"= \(?(.*?)\)? ({kinds})\(", text):
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
            for dims in re.findall(r"[fs]32\[([\d,]*)\]", shapes)
        ]
        moved.setdefault(kind, []).extend(sizes)
    batch, dim = 64, 16
    assert sorted(moved["all-gather"]) == [batch, batch * dim]
    assert moved["reduce-scatter"] == [batch // 8 * dim]
    assert max(moved["all-reduce"]) == batch and len(moved["all-reduce"]) <= 7
    assert moved.keys() == {"all-gather", "all-reduce", "reduce-scatter"}


def test_logits_never_exist_whole():
    """64 x 256 logits on each device are 64 KiB, those of a chunk 8 KiB."""
    whole, chunked = (compiled(8, chunk).memory_analysis() for chunk in (0, 32))
    assert chunked.temp_size_in_bytes < 4 * 64 * 256 < whole.temp_size_in_bytes
