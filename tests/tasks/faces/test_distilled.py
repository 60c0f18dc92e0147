"""Distillation from a teacher: its loss by hand, kept embeddings, clients, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax import mesh as meshes
from fedfr_jax.central.batches import TO_SHARD
from fedfr_jax.central.class_parallel import all_rows
from fedfr_jax.central.settings import Training
from fedfr_jax.configs import base
from fedfr_jax.data.align import arcface_template
from fedfr_jax.losses.margin_losses import cosface
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.models.saved_model import named_arrays
from fedfr_jax.models.weights import write_weights
from fedfr_jax.parts import parse
from fedfr_jax.tasks.data import build_batching
from fedfr_jax.tasks.faces import distillation as d
from fedfr_jax.tasks.faces.data import build_inputs
from fedfr_jax.tasks.faces.loss import COSFACE, face_loss, on_variables
from fedfr_jax.tasks.faces.public_classes import class_parallel_loss
from tests.tasks.faces import given
from tests.tasks.faces.given import (
    experiment_of,
    first_round,
    linear_model,
    partition_of,
    pretrain,
    source_of,
)

pytestmark = pytest.mark.ci

SHAPE, DIM = (16, 16, 1), 5
SHARP = COSFACE.with_settings(scale=64.0)
TINY = {"name": "sphereface", "blocks": (1,), "widths": (4,), "embedding_dim": DIM}
VIEWS = {
    "flip_probability": 0.5,
    "augment": [{"name": "face_mask", "fixed_per_image": True}],
}


def linear():
    """Embeddings that are linear in the pixels."""
    return linear_model(SHAPE, DIM)


def distillation_of(**others):
    teacher = d.Teacher(linear(), linear().init(jax.random.key(7)))
    known = {
        "weight": 9.0,
        "cache": None,
        "teacher_input": "same",
        "unlabeled_fraction": 0.0,
    }
    return d.Distillation(d.Distill(**{**known, **others}), teacher)


def batch_of(count=6, labels=None):
    images = np.random.default_rng(0).uniform(-1, 1, (count, *SHAPE))
    number = np.arange(count, dtype=np.int32)
    labels = number % 3 if labels is None else np.asarray(labels, np.int32)
    is_valid = number < count - 1  # the last is padding
    return given.batch_of(
        images.astype(np.float32), labels, num_classes=3, is_valid=is_valid
    )


def variables_of():
    kernel, head = (
        np.random.default_rng(0).normal(size=shape).astype(np.float32)
        for shape in ((SHAPE[0] * SHAPE[1], DIM), (3, DIM))
    )
    params = {"backbone": {"kernel": 0.1 * kernel}, "head": head, "phi": None}
    return {"params": params, "batch_stats": {}}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def by_hand(variables, batch, weight, is_labeled, scale=64.0, margin=0.4):
    """BigFace-Distill in NumPy."""
    flat = np.float64(batch.images).reshape(len(batch.images), -1)
    teacher = np.float64(distillation_of().teacher.variables["params"]["kernel"])
    x = unit(flat @ np.float64(variables["params"]["backbone"]["kernel"]))
    cosines = x @ unit(np.float64(variables["params"]["head"])).T
    hit = np.eye(3)[np.maximum(batch.labels, 0)]
    logits = scale * (cosines - margin * hit)
    losses = np.log(np.exp(logits).sum(1)) - (logits * hit).sum(1)
    valid = np.asarray(batch.is_valid)
    used = valid & is_labeled
    distance = 2 - 2 * (x * unit(flat @ teacher)).sum(1)
    classified = losses[used].sum() / max(1, used.sum())
    return classified + weight * distance[valid].mean()


def loss_of(one, **others):
    """(variables, batch, key) -> (total, aux), in one program."""
    make = lambda model: face_loss(model, loss=SHARP, **others)
    return jax.jit(d.with_distillation(make, on_variables(linear()), one))


def test_the_loss_is_cosface_and_nine_times_the_angular_distance():
    variables, batch = variables_of(), batch_of()
    loss = loss_of(distillation_of())
    total, (_, metrics) = loss(variables, batch, None)
    everybody = np.ones(6, bool)
    assert_allclose(total, by_hand(variables, batch, 9.0, everybody), rtol=1e-5)
    assert_allclose(
        9 * metrics["distillation_loss"] + metrics["classification_loss"],
        total,
        rtol=1e-5,
    )
    alone = jax.jit(face_loss(on_variables(linear()), loss=SHARP))
    without = loss_of(distillation_of(weight=0.0))
    found, wanted = (of(variables, batch, None)[0] for of in (without, alone))
    assert_array_equal(found, wanted)


def test_images_without_labels_are_taught_in_the_same_step():
    variables = variables_of()
    batch = batch_of(labels=[0, -1, 2, -1, 1, 0])
    loss = loss_of(distillation_of())
    has_label = np.array([True, False, True, False, True, True])
    total = loss(variables, batch, None)[0]
    assert_allclose(total, by_hand(variables, batch, 9.0, has_label), rtol=1e-5)
    grads = jax.jit(jax.grad(lambda v: loss(v, batch, None)[0]))(variables)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    nobody = loss_of(distillation_of(unlabeled_fraction=1.0))
    grads = jax.jit(jax.grad(lambda v: nobody(v, batch, None)[0]))(variables)["params"]
    assert_array_equal(grads["head"], 0)
    assert np.abs(grads["backbone"]["kernel"]).max() > 0


def test_the_share_without_labels_is_drawn_by_rows_and_never_changes():
    batch = batch_of(1)
    rows = jnp.arange(20000, dtype=jnp.int32)
    many = batch._replace(
        row=rows,
        targets={"label": jnp.zeros_like(rows)},
        is_valid=jnp.ones(20000, bool),
    )
    for share in (0.0, 0.3, 1.0):
        used = np.asarray(d.labeled_only(many, share).is_valid)
        assert abs(used.mean() - (1 - share)) < 0.015 * (0 < share < 1) + 1e-12
    shuffled = many._replace(row=rows[::-1])
    assert_array_equal(
        d.labeled_only(shuffled, 0.3).is_valid[::-1], d.labeled_only(many, 0.3).is_valid
    )


def faces(seed=0):
    labels = np.repeat(np.arange(7, dtype=np.int32), 4)
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (len(labels), *SHAPE), dtype=np.uint8)
    points = arcface_template(SHAPE[:2])[None] + rng.uniform(-3, 3, (len(labels), 1, 2))
    source = source_of(images, labels)
    return source._replace(landmarks=points.astype(np.float32))  # far from the default


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A file with embeddings of all six views."""
    path = tmp_path_factory.mktemp("cache") / "deep" / "teacher.safetensors"
    d.write_cache(path, faces(), distillation_of().teacher, views(), make_mesh(1))
    return path


def views(sees="same", **mask):
    """Those of the cache, unless the mask's settings are others."""
    mask = {"name": "face_mask", "fixed_per_image": True, **mask}
    settings = Training(batch_size=8, flip_probability=0.5, augment=(mask,))
    return d.cached_views(settings, sees)


def augmented(source, settings):
    """A batch of a whole source as a training of `settings` sees it, with the cache's
    rows beside it."""
    count = len(source.labels)
    rows = np.arange(count, dtype=np.int32)
    feed = build_batching(settings)
    run = jax.jit(lambda *a: feed.augment_batch(jax.random.key(3), 0, *a))
    given = build_inputs(source, True)(rows)
    inputs, targets, view = run(rows, given, {"label": rows})
    return batch_of(count)._replace(inputs=inputs, targets=targets, view_index=view)


def test_kept_embeddings_are_the_teachers_in_every_view(cache):
    source = faces()
    table = d.read_cache(cache, source, linear(), views(), distillation_of().teacher)
    assert table.shape == (28, 6, DIM) and table.dtype == np.float16
    batch = augmented(source, Training(**VIEWS))
    assert len(np.unique(batch.view_index)) > 3
    teach = d.with_live_teacher(distillation_of().teacher, "same")(batch)
    batch = batch._replace(targets={**batch.targets, d.KNOWN: jnp.asarray(table)})
    assert_allclose(d.with_cached_targets(batch), unit(np.asarray(teach)), atol=2e-3)
    loss, cached = (
        loss_of(distillation_of()),
        loss_of(distillation_of(cache=str(cache))),
    )
    ours, theirs = (f(variables_of(), batch, None)[0] for f in (loss, cached))
    assert_allclose(ours, theirs, rtol=2e-3)


def test_a_teacher_of_clean_images_sees_what_is_under_the_mask(tmp_path):
    source = faces()
    mask = {
        "name": "face_mask",
        "fixed_per_image": True,
        "keep_clean": True,
        "probability": 1,
    }
    settings = Training(batch_size=8, flip_probability=0.5, augment=(mask,))
    batch = augmented(source, settings)
    teach = d.with_live_teacher(distillation_of().teacher, "clean")(batch)
    bare = batch._replace(inputs={"image": batch.inputs["clean"]})
    assert_array_equal(
        teach, d.with_live_teacher(distillation_of().teacher, "same")(bare)
    )
    clean = d.cached_views(settings, "clean")
    assert clean.number == 2
    path = tmp_path / "clean.safetensors"
    d.write_cache(path, source, distillation_of().teacher, clean, make_mesh(1))
    table = jnp.asarray(d.read_cache(path, source, linear(), clean))
    batch = batch._replace(targets={**batch.targets, d.KNOWN: table})
    assert_allclose(d.with_cached_targets(batch), unit(np.asarray(teach)), atol=2e-3)
    with pytest.raises(
        ValueError, match="must be 'same' unless face_mask has keep_clean"
    ):
        d.with_live_teacher(distillation_of().teacher, "clean")(batch_of())


def test_a_cache_of_something_else_is_refused(cache, tmp_path):
    teacher, wider = distillation_of().teacher, linear()._replace(embedding_dim=8)
    moved = faces()._replace(landmarks=faces().landmarks + 1)
    other = d.Teacher(linear(), linear().init(jax.random.key(9)))
    none = tmp_path / "none.safetensors"
    images = "must belong to this source's images"
    for arguments, message in (
        ((cache, faces(1), linear(), views()), images),
        ((cache, faces()._replace(landmarks=None), linear(), views()), images),
        ((cache, moved, linear(), views()), images),
        (
            (cache, faces(), linear(), views("clean")),
            r"\(28, 2, 5\), got F16 \(28, 6, 5",
        ),
        ((cache, faces(), wider, views()), r"\(28, 6, 8\)"),
        ((none, faces(), linear(), views()), "must be a .safetensors file"),
        ((cache, faces(), linear(), views(seed=1)), "belong to this method's views"),
        (
            (cache, faces(), linear(), views(), other),
            "to this teacher, .*make it again",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            d.read_cache(*arguments)
    often = views(probability=0.1, surface_fraction=1.0)  # the same masks, less often
    d.read_cache(cache, faces(), linear(), often, teacher)
    with pytest.raises(ValueError, match="countable number of views"):
        d.cached_views(Training(augment=("face_mask",)), "same")


def opened(teacher, student):
    return parse(d.Distill, {"teacher": teacher}).open(student, "method")


def test_a_teacher_that_does_not_fit_is_refused(tmp_path):
    student, path = linear(), tmp_path / "teacher.npz"
    model = MODELS["sphereface"](SHAPE, blocks=(1,), widths=(4,), embedding_dim=DIM)
    variables = model.init(jax.random.key(1))
    write_weights(path, named_arrays(variables))
    found = opened({"weights": str(path), "model": TINY}, student)
    jax.tree.map(assert_array_equal, found.teacher.variables, variables)
    for change, message in (
        ({"embedding_dim": 8}, "must be the student's 5, got 8"),
        ({"blocks": (4097,)}, r"teacher.model.blocks must be in \[0, 4096"),
        ({"widths": (6,)}, r"teacher.npz: .* must be"),
    ):
        with pytest.raises(ValueError, match=message):
            opened({"weights": str(path), "model": {**TINY, **change}}, student)


MIRRORED = {"flip_probability": 0.5}  # two views, which compile in no time


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A file with embeddings of both views of MIRRORED."""
    path = tmp_path_factory.mktemp("mirrored") / "teacher.safetensors"
    both = d.cached_views(Training(batch_size=8, **MIRRORED), "same")
    d.write_cache(path, faces(), distillation_of().teacher, both, make_mesh(1))
    return path


def semi_supervised(cache, grid=(1, 1), more=None, **settings):
    """Pretraining on 8 images of two people and 4 of the part `nobody`; `more` are its
    other keys."""
    names = tuple(f"{'nobody' if i == 4 else 'known'}/{i}" for i in range(7))
    source = faces()._replace(names=names)
    is_test = np.arange(28) % 4 == 3
    who = {"public": (4, 2, 3), "unseen": (5, 6)}
    partition = partition_of(source.labels, is_test, [[0], [1]], **who)
    options = {"cache": str(cache), "unlabeled_source": "nobody", **settings}
    pretrain = {"epochs": 2, "batch_size": 4, "distill": options, **MIRRORED}
    pretrain |= {"class_parallel": grid != (1, 1), **(more or {})}
    given = {"pretrain": pretrain, "methods": {}}
    return experiment_of(given, linear(), source, partition, grid)


def test_a_part_of_the_source_without_labels_has_no_classes(mirrored, tmp_path):
    trained, labels = [], [-1] * 4 + [0] * 4 + [1] * 4
    for grid in ((1, 1), (2, 1)):
        built = semi_supervised(mirrored, grid)
        trainer = built.stages["pretrained"].trainer
        assert_array_equal(trainer.dataset.labels[trainer.first_row :], labels)
        trained.append(pretrain(built, tmp_path / str(grid[0]))["params"]["phi"])
    assert trainer.sharded_classes.names == ("known/2", "known/3")
    assert [x.shape for x in trained] == [(2, DIM)] * 2
    assert np.isfinite(trained).all()
    with pytest.raises(ValueError, match="unlabeled_source must be one of"):
        semi_supervised(mirrored, unlabeled_source="others")


def magface(cache, folder, grid=(1, 1), **keys):
    """Variables after a training of which a third of the labels are not used."""
    more = {"loss": "magface", **keys}
    return pretrain(semi_supervised(cache, grid, more, unlabeled_fraction=0.3), folder)


@pytest.fixture(scope="module")
def whole(mirrored, tmp_path_factory):
    return magface(mirrored, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    "devices, keys",
    [
        pytest.param(2, {"class_parallel": False}, marks=pytest.mark.slow),
        (4, {"class_parallel": False}),  # one image each, some without a label
        (1, {"class_parallel": False, "gradient_accumulation_steps": 4}),
        pytest.param(
            2,
            {"class_parallel": False, "gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(2, {}, marks=pytest.mark.slow),
        (2, {"gradient_accumulation_steps": 2}),
    ],
)
def test_images_without_labels_weigh_the_same_on_any_number_of_devices(
    mirrored, whole, tmp_path, devices, keys
):
    parts = magface(mirrored, tmp_path, (devices, 1), **keys)
    for ours, theirs in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
        assert_allclose(theirs, ours, rtol=1e-4, atol=1e-6 * np.abs(ours).max())


def test_classes_cut_over_devices_leave_out_who_has_no_label():
    """Of the whole batch, wherever the examples without a label lie."""
    variables, batch = variables_of(), batch_of(8, [0, -1, 2, -1, 1, 0, 2, 1])
    batch = batch._replace(is_valid=jnp.ones(8, bool))
    rule = cosface(scale=64.0, margin=0.4)
    make = lambda model: class_parallel_loss(model, rule)
    cut = d.with_distillation(make, on_variables(linear()), distillation_of())

    def of_part(variables, batch):
        held = all_rows(3, len(variables["params"]["phi"]))
        return jax.lax.pmean(cut(variables, batch, None, held=held)[0], meshes.CLIENTS)

    phi = jnp.concatenate([variables["params"]["head"], jnp.ones((1, DIM))])
    given = {**variables, "params": {**variables["params"], "phi": phi, "head": None}}
    rows = {"backbone": P(), "phi": P(meshes.CLIENTS), "head": P()}
    specs = {"params": rows, "batch_stats": P()}, TO_SHARD
    run = meshes.over_client_devices(make_mesh(2), of_part, specs, P())
    has_label = np.asarray(batch.labels) >= 0
    expected = by_hand(variables, batch, 9.0, has_label)
    assert_allclose(jax.jit(run)(given, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["fedfr", "fedavg"])
def test_clients_learn_from_the_servers_teacher_without_labels(
    algorithm, tmp_path, mirrored
):
    source = faces()
    is_test = np.arange(28) % 4 == 3
    who = {"public": (3, 4), "unseen": (5, 6)}
    partition = partition_of(source.labels, is_test, [[0], [1, 2]], **who)
    row = base.FEDAVG if algorithm == "fedfr" else {"algorithm": algorithm}
    row = {**row, "learning_rate": 0.5, "weight_decay": 0.0, "momentum": 0.0}
    row["distill"] = {"cache": str(mirrored), "weight": 1.0, "unlabeled_fraction": 1.0}
    settings = {
        "methods": {"taught": row},
        "federation": {"batch_size": 4, "local_epochs": 8, **MIRRORED},
    }
    built = experiment_of(settings, linear(), source, partition)
    assert built.task.dataset.targets[d.KNOWN].shape == (17, 2, DIM)
    trainer = built.stages["taught"].trainer
    backbone = linear().init(jax.random.key(0))
    phi = jnp.ones((2, DIM))
    start = {"params": {"backbone": backbone["params"], "phi": phi}, "batch_stats": {}}
    _, before, server, _ = first_round(built, "taught", start, tmp_path)
    images = np.asarray(built.task.dataset.images[:9], np.float32) / 127.5 - 1
    teacher = unit(
        np.asarray(linear().apply(distillation_of().teacher.variables, images)[0])
    )

    def away(at):
        found = trainer.apply_global(trainer.global_model(at), images)
        return np.square(unit(np.asarray(found)) - teacher).sum(1).mean()

    assert away(server) < 0.8 * away(before)
