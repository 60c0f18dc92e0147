"""The contract every model keeps, and what is particular to each."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS, register_model

TINY = {"widths": (4, 6), "blocks": (1, 4), "embedding_dim": 10}
SETTINGS = {
    "sphereface": TINY,
    "iresnet": TINY,
    "mobilefacenet": {"blocks": (3, 0, 0), "embedding_dim": 10},
    "vit": {"width": 8, "heads": 2, "depth": 4, "embedding_dim": 10},
    "resnet": {"widths": (4, 6), "blocks": (1, 4), "num_classes": 10},
    "mobilenet": {"width": 0.1, "num_blocks": 8, "num_classes": 10},
    "reid": {
        **{"widths": (4, 6), "blocks": (1, 1), "depth": 18, "stem": "cifar"},
        **{"bottleneck": 5, "dropout": 0.0, "num_classes": 10},
    },
    "linear_base": {"width": 6, "side": 3, "num_classes": 10},
    "segmenter": {
        "encoder": {"name": "resnet", "widths": (4, 6), "blocks": (1, 1)},
        "width": 4,
        "num_classes": 10,
    },
    "cnn": {"widths": (4, 6), "embedding_dim": 10},
    "mlp": {"hidden": 10},
    "leaf_celeba": {"widths": (4, 6), "num_classes": 10},
    "leaf_femnist": {"widths": (4, 6), "hidden": 12, "num_classes": 10},
    "logistic": {"num_classes": 10},
}
SHAPE = (30, 28, 3)
members = pytest.mark.parametrize("name", MODELS)


@functools.cache
def _model(name, **settings):
    return MODELS[name](SHAPE, **SETTINGS[name] | settings)


@functools.cache
def _variables(name, seed=0):
    return _model(name).init(jax.random.key(seed))


def _classifier(name):
    """A network with logits: the one of SETTINGS where that has them."""
    is_one = "num_classes" in SETTINGS[name]
    return _model(name) if is_one else _model(name, num_classes=7)


def _apply(model, variables, x, train):
    return jax.jit(model.apply, static_argnums=2)(variables, x, train)


def _images(num, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(-1, 1, (num, *SHAPE)).astype(np.float32))


@members
def test_init_is_deterministic_and_depends_on_the_key(name):
    model = _model(name)
    a, b, c = model.init(jax.random.key(0)), _variables(name), _variables(name, 1)
    assert set(a) == {"params", "batch_stats"}
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert any(
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(c), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "stack"), [("sphereface", "block[2:6]"), ("iresnet", "block[2:5]")]
)
def test_blocks_of_a_stack_start_different(name, stack):
    blocks = _variables(name)["params"]["stage2"][stack]
    for conv in ("conv1", "conv2"):
        first, second = np.asarray(blocks[conv]["kernel"])[:2]
        assert not np.any(first == second)


@members
@pytest.mark.parametrize("train", [False, True])
def test_apply_gives_finite_embeddings_and_the_same_structure(name, train):
    model = _model(name)
    variables = _variables(name)
    embedding, stats = _apply(model, variables, _images(3), train)
    pixels = SHAPE[:2] if name == "segmenter" else ()
    assert embedding.shape == (3, *pixels, model.embedding_dim) == (3, *pixels, 10)
    assert embedding.dtype == jnp.float32
    assert np.all(np.isfinite(embedding))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(stats) == shapes(variables["batch_stats"])


@members
def test_evaluation_of_an_image_does_not_depend_on_its_batch(name):
    model = _model(name)
    variables, x = _variables(name), _images(3)
    one, stats = _apply(model, variables, x, False)
    beside_others, _ = _apply(model, variables, _images(3, 1).at[2].set(x[2]), False)
    np.testing.assert_array_equal(one[2], beside_others[2])
    jax.tree.map(np.testing.assert_array_equal, stats, variables["batch_stats"])


@members
def test_gradients_are_finite_on_black_and_on_zero_images(name):
    model = _model(name)
    variables = _variables(name)

    def loss(params, x):
        own = {"params": params, "batch_stats": variables["batch_stats"]}
        return jnp.sum(jnp.sin(model.apply(own, x, True)[0]))

    gradient = jax.jit(jax.grad(loss))
    for value in (-1.0, 0.0):
        gradients = gradient(variables["params"], jnp.full((2, *SHAPE), value))
        assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@members
def test_vmap_over_clients_equals_each_client_alone(name):
    model = _model(name)
    variables = [_variables(name, seed) for seed in (0, 1)]
    x = jnp.stack([_images(3, seed) for seed in (1, 2)])
    together = jax.jit(jax.vmap(lambda v, x: model.apply(v, x, True)))
    got = together(jax.tree.map(lambda *a: jnp.stack(a), *variables), x)
    for i in range(2):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-4),
            got,
            _apply(model, variables[i], x[i], True),
        )


@members
def test_float64_variables_compute_in_float64(name):
    with jax.enable_x64(True):
        model = _model(name)
        variables = jax.tree.map(lambda x: x.astype(jnp.float64), _variables(name))
        x = np.asarray(_images(3), np.float32)
        embedding, stats = _apply(model, variables, jnp.asarray(x), True)
        assert embedding.dtype == jnp.float64
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(stats))


@members
def test_images_of_another_shape_are_refused(name):
    with pytest.raises(AssertionError):
        _model(name).apply(_variables(name), jnp.zeros((2, 28, 28, 3)), False)
    with pytest.raises(ValueError, match="image_shape"):
        MODELS[name]((28, 0, 3), **SETTINGS[name])


@pytest.mark.parametrize("name", ["sphereface", "iresnet", "mobilefacenet", "vit"])
def test_scanned_and_unrolled_stacks_are_the_same_network(name):
    scanned = _model(name, implementation="xla")
    unrolled = _model(name, implementation="xla", scan=False)
    variables = _variables(name)
    jax.tree.map(
        np.testing.assert_array_equal, variables, unrolled.init(jax.random.key(0))
    )

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        _apply(scanned, variables, _images(3), True),
        _apply(unrolled, variables, _images(3), True),
    )


def test_the_deepest_iresnet_is_no_longer_a_program_than_iresnet_50():
    """So it compiles about as fast: 80 and 512 equal blocks are loops like 4 and 14."""

    def program(depth):
        model = MODELS["iresnet"]((16, 16, 3), depth=depth, widths=(2, 2, 2, 2))
        variables = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params, stats, x):
            given = {"params": params, "batch_stats": stats}
            output, stats = model.apply(given, x, True)
            return (output**2).sum(), stats

        gradient = jax.jit(jax.grad(loss, has_aux=True))
        x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
        return gradient.lower(*map(variables.get, ("params", "batch_stats")), x)

    shallow, deep = (len(program(depth).as_text()) for depth in (50, 1200))
    assert deep == pytest.approx(shallow, rel=0.01)


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_small_networks_give_logits_when_told_the_number_of_classes(name):
    model = _classifier(name)
    assert model.embedding_dim == 7
    variables = model.init(jax.random.key(0))
    hidden, _ = _apply(_model(name), variables, _images(3), False)
    logits, _ = _apply(model, variables, _images(3), False)
    top = variables["params"]["classifier"]
    want = hidden @ top["kernel"] + top["bias"].reshape(1, 7)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    assert np.any(logits < 0)


@pytest.mark.parametrize(
    "name, top",
    [
        *[(x, "classifier") for x in ("cnn", "mlp", "leaf_celeba", "leaf_femnist")],
        ("resnet", "fc"),
    ],
)
def test_features_are_what_the_last_layer_is_given(name, top):
    model = _classifier(name)
    variables, x = model.init(jax.random.key(0)), _images(3)
    for train in (False, True):
        run = jax.jit(model.features, static_argnums=2)
        logits, features, stats = run(variables, x, train)
        want, want_stats = _apply(model, variables, x, train)
        np.testing.assert_array_equal(logits, want)
        jax.tree.map(np.testing.assert_array_equal, stats, want_stats)
        last = variables["params"][top]
        want = features @ last["kernel"] + last["bias"][None]
        np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    embedder = _model("cnn")
    embedding, features, _ = embedder.features(_variables("cnn"), x)
    np.testing.assert_array_equal(features, embedding)


SMALL = {"cnn", "leaf_celeba", "leaf_femnist", "linear_base", "logistic", "mlp"}


def test_every_network_takes_a_dtype_and_those_of_blocks_remat():
    keys = {name: inspect.signature(MODELS[name]).parameters for name in MODELS}
    assert all("dtype" in known for known in keys.values())
    without = {name for name in keys if "remat" not in keys[name]}
    assert without == {*SMALL, "segmenter"}  # the segmenter's encoders have it


HALVED = ("sphereface", "iresnet", "resnet", "vit", *sorted(SMALL))


@pytest.mark.parametrize("name", HALVED)
def test_half_precision_is_close_and_returns_float32(name):
    known = inspect.signature(MODELS[name]).parameters
    plain = {"implementation": "xla"} if "implementation" in known else {}
    half = _model(name, dtype="bfloat16", **plain)
    want, _ = _apply(_model(name), _variables(name), _images(8), True)
    got, _ = _apply(half, _variables(name), _images(8), True)
    assert got.dtype == jnp.float32
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < 0.05


def test_implementations_give_the_same_embeddings():
    variables, x = _variables("cnn"), _images(2)
    want, *others = (
        _apply(_model("cnn", implementation=implementation), variables, x, False)[0]
        for implementation in ("xla", "im2col", "winograd")
    )
    for got in others:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "depth", "count"),
    [
        ("sphereface", 64, 49_726_656),
    ],
)
def test_numbers_of_parameters_are_the_published_ones(name, depth, count):
    assert _count(MODELS[name]((112, 112, 3), depth=depth)) == count


@functools.cache
def _count(model):
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@functools.cache
def _iresnet(depth=18, **settings):
    return MODELS["iresnet"]((112, 112, 3), depth=depth, **settings)


@pytest.mark.parametrize(
    ("depth", "count", "billions"),  # of parameters and of multiply-adds
    [
        (18, 24_025_600, 2.610),
        (34, 34_139_328, 4.460),
        (50, 43_590_848, 6.309),
        (100, 65_156_160, 12.090),
        (120, 76_970_560, 14.402),
        (140, 87_013_696, 16.714),
        (200, 118_833_920, 23.419),
        (240, 137_229_376, 28.274),
        (600, 306_490_816, 69.199),
        (1200, 654_429_376, 139.024),
        (2060, 1_122_301_120, 238.908),
    ],
)
def test_iresnets_have_the_sizes_of_the_published_ones(depth, count, billions):
    # The official counts include the 512 frozen scales of the last BN.
    assert _count(_iresnet(depth)) == count - 512
    assert round(_iresnet(depth).flops / 2e9, 3) == billions


@pytest.mark.parametrize(
    ("depth", "billions"), [(18, 1.743), (50, 5.442), (240, 27.407), (1200, 138.157)]
)
def test_a_stride_on_the_first_convolution_saves_a_large_one_in_every_stage(
    depth, billions
):
    first = _iresnet(depth, stride_on="first")
    assert round(first.flops / 2e9, 3) == billions
    assert _count(first) == _count(_iresnet(depth))
    stages = ((64, 64, 56), (64, 128, 28), (128, 256, 14), (256, 512, 7))
    saved = sum(9 * before * after * 3 * side**2 for before, after, side in stages)
    assert _iresnet(depth).flops - first.flops == 2 * saved  # 0.867 billion


@pytest.mark.parametrize(
    ("name", "settings", "count", "billions"),
    [
        # The paper says 0.99 million parameters, without those of BN and PReLU, and
        # 221 million multiply-adds.
        ("mobilefacenet", {}, 1_003_136, 0.221),
        # insightface's table says 1.5, 5.7, 11.4 and 25.3 billion.
        ("vit", {"size": "T"}, 19_137_536, 1.505),
        ("vit", {"size": "S"}, 76_022_784, 5.747),
        ("vit", {"size": "B"}, 113_832_960, 11.437),
        ("vit", {"size": "L"}, 255_683_584, 25.338),
    ],
)
def test_small_and_attending_networks_have_the_published_sizes(
    name, settings, count, billions
):
    model = MODELS[name]((112, 112, 3), **settings)
    assert _count(model) == count and round(model.flops / 2e9, 3) == billions


def test_masked_patches_are_not_looked_at_and_are_drawn_with_the_key():
    model = _model("vit", mask_ratio=0.8)  # one patch of nine is seen
    variables = model.init(jax.random.key(1))

    @jax.jit
    def slope(x, key):
        apply = lambda x: model.apply(variables, x, True, key=key)[0]
        return jax.grad(lambda x: jnp.sum(jnp.sin(apply(x))))(x)

    x = _images(4)
    seen = np.abs(slope(x, jax.random.key(0)))[:, :27, :27].sum(-1)
    patches = seen.reshape(4, 3, 9, 3, 9).sum((2, 4)).reshape(4, 9) > 0
    assert (patches.sum(1) == 1).all()
    others = np.abs(slope(x, jax.random.key(7)))[:, :27, :27].sum(-1)
    assert ((others > 0) != (seen > 0)).any()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mobilefacenet", {"blocks": (4, 6)}, "blocks must be at least 0 in each of 3"),
        ("mobilefacenet", {"scale": 0}, "scale must be at least 1, got 0"),
        ("vit", {"size": "M"}, "size must be one of .*, got 'M'"),
        ("vit", {"width": 100}, "width must be a multiple of 8 heads, got 100"),
        ("vit", {"patch": 113}, r"patch must lie in \[1, 112\], .* got 113"),
        ("vit", {"mask_ratio": 1.0}, r"mask_ratio must be in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_small_and_attending_networks_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        MODELS[name]((112, 112, 3), **settings)


def test_other_heads_and_shortcuts_have_the_parameters_that_they_say():
    make = _iresnet
    plain, pixels, dim = _count(make()), 7 * 7 * 512, 512
    first = make(stride_on="first").flops / 2e9
    assert round(make().flops / 2e9 - first, 3) == 0.867
    # The first block of stage 1: a convolution of 64 to 64 channels and its BN.
    assert plain - _count(make(shortcut="pool")) == 64 * 64 + 2 * 64
    assert plain - _count(make(head="F")) == dim  # the bias of the last BN
    expert, gate = pixels * dim + dim + 2 * 512, pixels * 2 + 2 + 2 * 512
    assert _count(make(head="moe")) - plain == expert + gate - dim
    assert plain - _count(make(head="GAP")) == 48 * 512 * dim
    assert plain - _count(make(head="GDC")) == 48 * 512 * dim - pixels


def test_two_experts_are_mixed_by_the_gate_that_the_model_shows():
    model = _model("iresnet", head="moe")
    variables, x = model.init(jax.random.key(3)), _images(3)
    run = jax.jit(model.features, static_argnums=2)
    _, gate, _ = run(variables, x, True)
    assert gate.shape == (3, 2)

    def sure(which):
        own = jax.tree.map(jnp.copy, variables)
        bias = own["params"]["gate"]["fc"]["bias"]
        own["params"]["gate"]["fc"]["bias"] = bias.at[which].set(1e4)
        return run(own, x, True)[0]

    share = jax.nn.softmax(gate)
    mixed = share[:, :1] * sure(0) + share[:, 1:] * sure(1)
    np.testing.assert_allclose(run(variables, x, True)[0], mixed, rtol=1e-4, atol=1e-5)
    assert not np.allclose(sure(0), sure(1))


def test_sphereface_parameter_names_and_initial_values():
    model = MODELS["sphereface"]((28, 28, 3), widths=(16, 32), blocks=(0, 3))
    params = model.init(jax.random.key(0))["params"]
    assert set(params) == {"stage1", "stage2", "fc"}
    assert set(params["stage1"]) == {"block1"}
    blocks, first = params["stage2"]["block[2:5]"], params["stage2"]["block1"]
    assert blocks["conv1"]["kernel"].shape == (3, 3, 3, 32, 32)
    assert blocks["prelu2"]["slope"].shape == (3, 32)
    np.testing.assert_allclose(jnp.std(blocks["conv2"]["kernel"]), 0.01, rtol=0.05)
    bound = np.sqrt(6 / (9 * 16 + 9 * 32))
    largest = jnp.max(jnp.abs(first["conv"]["kernel"]))
    assert 0.99 * bound < largest <= bound
    np.testing.assert_array_equal(first["conv"]["bias"], 0)
    assert params["fc"]["kernel"].shape == (7 * 7 * 32, 512)


def test_iresnet_parameter_names_and_initial_values():
    model = MODELS["iresnet"]((28, 28, 3), widths=(16, 32), blocks=(1, 3))
    variables = model.init(jax.random.key(0))
    params = variables["params"]
    assert set(params) == {"stem", "stage1", "stage2", "bn", "fc", "bn_out"}
    assert set(params["stage1"]) == {"block1"}
    assert "shortcut" in params["stage1"]["block1"]
    blocks = params["stage2"]["block[2:4]"]
    assert blocks["conv1"]["kernel"].shape == (2, 3, 3, 32, 32)
    np.testing.assert_allclose(jnp.std(blocks["conv1"]["kernel"]), 0.1, rtol=0.05)
    assert variables["batch_stats"]["stage2"]["block[2:4]"]["bn3"]["var"].shape == (
        2,
        32,
    )
    assert set(params["bn_out"]) == {"bias"}


def test_the_stride_can_sit_on_the_first_convolution():
    first, second = (_model("iresnet", stride_on=s) for s in ("first", "second"))
    a, _ = _apply(first, _variables("iresnet"), _images(2), False)
    b, _ = _apply(second, _variables("iresnet"), _images(2), False)
    assert a.shape == b.shape and not np.allclose(a, b)


@pytest.mark.parametrize("name", ["sphereface", "iresnet"])
@pytest.mark.parametrize("size", [28, 56, 96, 112])
def test_any_size_of_image_gives_a_network(name, size):
    model = MODELS[name]((size, size, 3), widths=(2, 2, 2, 4), blocks=(1, 1, 1, 1))
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    side = -(-size // 16)
    assert params["fc"]["kernel"].shape == (side * side * 4, 512)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 19}, "depth must be one of .*, got 19"),
        ({"blocks": (1, 1)}, "blocks must be at least"),
        ({"blocks": (1, 1, 1, -1)}, "blocks must be at least"),
        ({"shortcut": "max"}, "shortcut must be one of .*, got 'max'"),
        ({"head": "Z"}, "head must be one of .*, got 'Z'"),
        ({"head": "GAP", "dropout": 0.4}, "dropout must be 0 with head GAP, got 0.4"),
        ({"stride_on": "third"}, "stride_on must be"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_iresnets_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MODELS["iresnet"]((112, 112, 3), **settings)


def test_leaf_networks_have_the_sizes_of_the_paper():
    def count(model):
        params = jax.eval_shape(model.init, jax.random.key(0))["params"]
        return sum(x.size for x in jax.tree.leaves(params))

    convolutions = 3 * 3 * (3 + 3 * 32) * 32 + 4 * 32 + 4 * 2 * 32
    celeba = MODELS["leaf_celeba"]((84, 84, 3))
    assert count(celeba) == convolutions + (5 * 5 * 32 + 1) * 2
    femnist = MODELS["leaf_femnist"]((28, 28, 1))
    assert count(femnist) == 832 + 51264 + (7 * 7 * 64 + 1) * 2048 + 2049 * 62
    with pytest.raises(ValueError, match="at least 16 pixels .* 4 poolings"):
        MODELS["leaf_celeba"]((12, 84, 3))


def test_logistic_regression_takes_vectors_and_its_features_are_the_logits():
    model = MODELS["logistic"]((60,), num_classes=3)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 60)), jnp.float32)
    variables = jax.tree.map(lambda w: w + 1, model.init(jax.random.key(0)))
    logits, features, _ = model.features(variables, x)
    np.testing.assert_array_equal(features, logits)
    kernel = variables["params"]["classifier"]["kernel"]
    np.testing.assert_allclose(logits, x @ kernel + 1, rtol=1e-4, atol=1e-5)


def test_a_small_image_is_refused_by_cnn():
    with pytest.raises(ValueError, match="at least 6 pixels"):
        MODELS["cnn"]((5, 28, 1))


def test_a_network_without_a_width_is_refused():
    for make in MODELS.values():
        known = inspect.signature(make).parameters
        sizes = {"num_classes": 2} if "num_classes" in known else {}
        for widths in ((), (8, 0)) if "widths" in known else ():
            with pytest.raises(ValueError, match="widths must be"):
                make((32, 32, 3), widths=widths, **sizes)


def test_a_registered_model_is_one_of_the_family():
    factory = functools.partial(MODELS["mlp"], hidden=3)
    try:
        register_model("tiny_mlp", factory)
        register_model("tiny_mlp", factory)  # as when a notebook's cell runs again
        assert MODELS["tiny_mlp"](SHAPE).embedding_dim == 3
        with pytest.raises(ValueError, match="name of its own, got 'tiny_mlp'"):
            register_model("tiny_mlp", MODELS["mlp"])
    finally:
        MODELS.pop("tiny_mlp")
