"""The contract that every network keeps."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from tests.federated.toys import others_are_slow
from tests.models.made import (
    SETTINGS,
    SHAPE,
    images_of,
    model_of,
    outputs_of,
    variables_of,
)

members = pytest.mark.parametrize("name", SETTINGS)  # the networks of images


def classifier_of(name):
    """A network with logits: the one of SETTINGS where that has them."""
    is_one = "num_classes" in SETTINGS[name]
    return model_of(name) if is_one else model_of(name, num_classes=7)


@members
def test_init_is_deterministic_and_depends_on_the_key(name):
    model = model_of(name)
    a, b, c = model.init(jax.random.key(0)), variables_of(name), variables_of(name, 1)
    assert set(a) == {"params", "batch_stats"}
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert any(
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(c), strict=True)
    )


@members
@pytest.mark.parametrize("train", [False, True])
def test_apply_gives_finite_embeddings_and_the_same_structure(name, train):
    model = model_of(name)
    variables = variables_of(name)
    embedding, stats = outputs_of(model, variables, images_of(3), train)
    pixels = SHAPE[:2] if name == "segmenter" else ()
    assert embedding.shape == (3, *pixels, model.embedding_dim) == (3, *pixels, 10)
    assert embedding.dtype == jnp.float32
    assert np.all(np.isfinite(embedding))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(stats) == shapes(variables["batch_stats"])


@members
def test_evaluation_of_an_image_does_not_depend_on_its_batch(name):
    model = model_of(name)
    variables, x = variables_of(name), images_of(3)
    one, stats = outputs_of(model, variables, x, False)
    beside_others, _ = outputs_of(
        model, variables, images_of(3, 1).at[2].set(x[2]), False
    )
    np.testing.assert_array_equal(one[2], beside_others[2])
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])


# `linear_base` has their block.
LARGE = {"mobilefacenet", "mobilenet"}


@pytest.mark.parametrize(
    "name", others_are_slow({(x,) for x in SETTINGS.keys() - LARGE}, SETTINGS)
)
def test_vmap_over_clients_equals_each_client_alone(name):
    """And gradients are finite on zero and on black images."""
    model = model_of(name)
    variables = [variables_of(name, seed) for seed in (0, 1, 0, 0)]
    plain = [jnp.full((3, *SHAPE), value) for value in (0.0, -1.0)]
    x = jnp.stack([*(images_of(3, seed) for seed in (1, 2)), *plain])

    def loss(params, stats, x):
        output, stats = model.apply({"params": params, "batch_stats": stats}, x, True)
        return jnp.sum(jnp.sin(output)), (output, stats)

    together = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))
    stacked = jax.tree.map(lambda *a: np.stack(a), *variables)
    gradients, got = together(stacked["params"], stacked["batch_stats"], x)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
    for i in range(2):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-4),
            got,
            outputs_of(model, variables[i], x[i], True),
        )


@pytest.mark.parametrize(
    "name, top",
    [
        *[(x, "classifier") for x in ("cnn", "mlp", "leaf_celeba", "leaf_femnist")],
        ("resnet", "fc"),
    ],
)
def test_features_are_what_the_last_layer_is_given(name, top):
    model = classifier_of(name)
    variables, x = model.init(jax.random.key(0)), images_of(3)
    for train in (False, True):
        run = jax.jit(model.apply_with_features, static_argnums=2)
        logits, features, stats = run(variables, x, train)
        want, want_stats = outputs_of(model, variables, x, train)
        np.testing.assert_array_equal(logits, want)
        jax.tree.map(np.testing.assert_array_equal, stats, want_stats)
        last = variables["params"][top]
        want = features @ last["kernel"] + last["bias"][None]
        np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    embedder = model_of("cnn")
    embedding, features, _ = embedder.apply_with_features(variables_of("cnn"), x)
    np.testing.assert_array_equal(features, embedding)


RESNET = {"blocks": (1, 2), "widths": (4, 8), "num_classes": 5}
IMPOSSIBLE = [
    (
        "resnet",
        RESNET | {"depth": 19, "blocks": None},
        "depth must be one of .18, 34, 50.*got 19",
    ),
    ("resnet", RESNET | {"blocks": (1,)}, "blocks must be 2 integers >= 1, one per"),
    ("resnet", RESNET | {"stem": "face"}, "stem must be one of .*, got 'face'"),
    ("resnet", RESNET | {"norm": "layer"}, "norm must be one of .*, got 'layer'"),
    ("leaf_celeba", {"widths": (4,) * 5}, "at least 32 pixels .* 5 poolings"),
]


@pytest.mark.parametrize("name, settings, words", IMPOSSIBLE)
def test_impossible_networks_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=words):
        MODELS[name](SHAPE, **settings)


SMALL = {"cnn", "leaf_celeba", "leaf_femnist", "linear_base", "logistic", "mlp"}


def test_every_network_takes_a_dtype_and_those_of_blocks_remat():
    assert MODELS.keys() - SETTINGS.keys() == {"tabular", "torch"}
    keys = {name: inspect.signature(MODELS[name]).parameters for name in SETTINGS}
    assert all("dtype" in known for known in keys.values())
    without = {name for name in keys if "remat" not in keys[name]}
    assert without == {*SMALL, "segmenter"}  # the segmenter's encoders have it


HALVED = ("sphereface", "iresnet", "vit", *sorted(SMALL))


@pytest.mark.parametrize("name", HALVED)
def test_half_precision_is_close_and_returns_float32(name):
    half = model_of(name, dtype="bfloat16")
    want, _ = outputs_of(model_of(name), variables_of(name), images_of(8), True)
    got, _ = outputs_of(half, variables_of(name), images_of(8), True)
    assert got.dtype == jnp.float32
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < 0.05
