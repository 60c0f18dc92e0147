"""Bases of timm, transformers and torchvision: files, numbers, image sizes.

Weights are drawn from names and shapes. golden/bases.npz has both, and what the
originals make of the weights; with the packages (`make test-torch`) the originals are
asked again. `python -m tests.models.test_bases` makes the file.
"""

import functools
import json
import pathlib
import re
import zlib

import jax
import numpy as np
import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.deploy.trained_model import open_network
from fedfr_jax.models import MODELS, build_model
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.frozen import moving_variables, with_frozen
from fedfr_jax.models.saved_model import named_arrays
from fedfr_jax.models.weights import Weights, read_weights, write_weights
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import with_tuples
from fedfr_jax.tasks.model import our_names, with_modules
from fedfr_jax.trees import by_name

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "bases.npz"
TINY = {"width": 128, "depth": 3, "num_heads": 2, "patch_size": 7}
TRANSFORMER = {"name": "vision_transformer", **TINY}
CLIP = {"pre_norm": True, "epsilon": 1e-5}
CONVNEXT = {"name": "convnext", "blocks": [1, 4], "widths": [8, 16], "num_classes": 5}
SECTIONS = {  # case: what is found in its file
    "timm": {**TRANSFORMER, "num_classes": 5},
    "timm_registers": {**TRANSFORMER, "registers": 4, "layer_scale": 1e-5},
    "timm_mean": {**TRANSFORMER, "class_token": False, "pool": "mean_first"},
    "timm_clip": {**TRANSFORMER, **CLIP, "num_classes": 6},
    "dinov2": {**TRANSFORMER, "layer_scale": 1e-5},
    "dinov2_registers": {**TRANSFORMER, "registers": 4, "layer_scale": 1e-5},
    "clip": {
        **{**TRANSFORMER, **CLIP, "activation": "quick_gelu"},
        **{"hidden_dim": 96, "embedding_dim": 16},
    },
    "convnext": CONVNEXT,
    "timm_convnext": CONVNEXT | {"blocks": [1, 4, 1, 1], "widths": [8, 16, 24, 16]},
    "resnet": {
        **{"name": "resnet", "num_classes": 5, "depth": 50, "blocks": [1, 1, 1, 1]},
        **{"widths": [64, 128, 256, 512], "stem": "imagenet"},
    },
}
# Originals that interpolate positions with antialiasing, on another image.
SIZES = {
    "timm": ((42, 28), (14, 21)),
    "timm_mean": ((21, 21),),
    "dinov2_registers": ((42, 28), (14, 21)),
}
SHAPE = {
    **dict.fromkeys(SECTIONS, (28, 28, 3)),
    **dict.fromkeys(("convnext", "timm_convnext", "resnet"), (32, 40, 3)),
}
cases = pytest.mark.parametrize("case", SECTIONS)


def drawn(name, shape):
    """An array of a file: a function of its name."""
    z = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var"):
        z = np.exp(0.1 * z)
    elif name.endswith(("gamma", "lambda1", "layer_scale")):
        z = 0.5 + 0.1 * z
    elif name.endswith("weight") and z.ndim > 1:
        z = z / np.sqrt(np.prod(shape[1:]))
    elif name.endswith("weight"):
        z = 1 + 0.1 * z
    elif z.ndim == 1:
        z = 0.1 * z
    return z.astype(np.float32)


def images(height, width):
    x = np.random.RandomState(0).uniform(-1, 1, (2, height, width, 3))
    return x.astype(np.float32)


@functools.cache
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def weights_of(case):
    names = json.loads(str(golden()[f"{case}/names"]))
    return Weights({name: drawn(name, shape) for name, shape in names.items()}, {})


def run(section, shape, weights, x):
    variables = convert_variables(weights, section, shape)
    model = build_model(section, shape)
    return np.asarray(jax.jit(model.apply)(variables, x)[0])


def key_of(case, height, width):
    return f"{case}/{height}x{width}"


@cases
def test_a_file_gives_the_originals_numbers(case):
    weights = weights_of(case)
    section, shape = detect_model(weights)
    assert section == SECTIONS[case]
    if "name" in section and section["name"] == "vision_transformer":
        assert shape == SHAPE[case]
    height, width, _ = SHAPE[case]
    found = run(section, SHAPE[case], weights, images(height, width))
    wanted = golden()[key_of(case, height, width)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.1


@pytest.mark.parametrize("case", SIZES)
def test_positions_are_resized_to_other_images(case):
    weights = weights_of(case)
    for height, width in SIZES[case]:
        shape = (height, width, 3)
        found = run(SECTIONS[case], shape, weights, images(height, width))
        wanted = golden()[key_of(case, height, width)]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_metas_names_and_the_class_tokens_position_are_known():
    arrays = weights_of("timm_registers").arrays
    row = drawn("position", (1, 1, TINY["width"]))
    metas = {
        **{name: x for name, x in arrays.items() if name != "reg_token"},
        "cls_token": arrays["cls_token"] - row,
        "pos_embed": np.concatenate([row, arrays["pos_embed"]], 1),
        "register_tokens": arrays["reg_token"],
        "mask_token": row[0],
    }
    section, shape = detect_model(Weights(metas, {}))
    assert (section, shape) == (SECTIONS["timm_registers"], SHAPE["timm_registers"])
    wanted = convert_variables(Weights(arrays, {}), section, shape)
    found = convert_variables(Weights(metas, {}), section, shape)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, wanted)


def test_insightfaces_transformer_is_read_by_its_names():
    settings = {**TINY, "num_heads": 8, "patch_size": 9, "embedding_dim": 6}
    model = MODELS["vit"]((112, 112, 3), **settings, mask_ratio=0.5)
    leaves = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda x: rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
    variables = jax.tree.map(draw, leaves)
    head = {"fc1": "feature.0", "bn1": "feature.1", "fc2": "feature.2"}
    head |= {"bn2": "feature.3", "patches": "patch_embed.proj", "norm": "norm"}
    kinds = {"mean": "running_mean", "var": "running_var", "bias": "bias"}
    arrays = {}
    for name, array in named_arrays(variables).items():
        _, module, *inner, kind = name.split("/")
        if module in ("positions", "mask_token"):
            word = {"positions": "pos_embed", "mask_token": "mask_token"}[module]
            arrays[word] = array.reshape(1, -1, TINY["width"])
            continue
        if module == "encoder":
            part = {"qkv": "attn", "proj": "attn", "fc1": "mlp", "fc2": "mlp"}
            number, layer = int(inner[0].removeprefix("block")) - 1, inner[1]
            where = f"{part[layer]}.{layer}" if layer in part else layer
            where = f"blocks.{number}.{where}"
        else:
            where = head[module]
        if kind == "kernel":
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        if kind == "var":
            array = array - np.float32(1e-5)  # theirs adds 2e-5 to it, ours 1e-5
        arrays[f"{where}.{kinds.get(kind, 'weight')}"] = array
    weights = Weights(arrays, {})
    section, shape = detect_model(weights)
    assert (section, shape) == ({"name": "vit", **settings}, (112, 112, 3))
    plain = by_name(convert_variables(weights, section, shape))
    assert "params/mask_token/vector" not in plain
    back = convert_variables(weights, section | {"mask_ratio": 0.5}, shape)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, back, variables)


OTHER = (21, 21, 3)
MISTAKES = [
    ({"patch_size": 4}, r"patches/kernel must be \(4, 4, 3, 128\), got \(7, 7, 3, 12"),
    ({"depth": 2}, r"block3/fc1/bias must be absent, got \(512,\)"),
    ({"width": 64}, r"block1/fc1/bias must be \(256,\), got \(512,\)"),
    ({"registers": 4}, r"prefix/table must be \(5, 128\), got \(1, 128\)"),
]


def started(section, weights):
    """Initial variables of a model that begins with the weights of a file."""
    variables = build_model(section, OTHER).init(jax.random.key(0))
    return variables, with_modules(variables, our_names(weights))


@pytest.mark.parametrize("settings, words", MISTAKES)
def test_another_size_patch_or_depth_names_the_leaf(settings, words):
    weights = weights_of("timm")
    with pytest.raises(ValueError, match=words) as error:
        convert_variables(weights, SECTIONS["timm"] | settings, SHAPE["timm"])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="must fit the model: params/"):
        started(SECTIONS["timm"] | settings, weights)


def test_names_that_fit_nothing_are_refused():
    arrays = weights_of("timm").arrays
    extra = {**arrays, "blocks.0.mlp.gate.weight": arrays["blocks.0.mlp.fc1.weight"]}
    with pytest.raises(ValueError, match=r"block1/gate/kernel must be absent, got"):
        convert_variables(Weights(extra, {}), SECTIONS["timm"], SHAPE["timm"])
    for part in ("patch_embed.proj.weight", "blocks.0.mlp.fc1.bias", "pos_embed"):
        fewer = {name: x for name, x in arrays.items() if part not in name}
        with pytest.raises(ValueError, match="name the network"):
            detect_model(Weights(fewer, {}))
    empty = {**arrays, "patch_embed.proj.weight": np.zeros((0, 3, 7, 7), np.float32)}
    with pytest.raises(ValueError, match="patches/kernel must have 4 axes with elem"):
        detect_model(Weights(empty, {}))
    uneven = {**arrays, "pos_embed": arrays["pos_embed"][:, 1:8]}
    with pytest.raises(ValueError, match="positions of a square of patches, got 7"):
        detect_model(Weights(uneven, {}))


def test_training_starts_from_a_file_of_another_image_size_and_other_classes():
    weights = weights_of("timm")
    before, found = started(SECTIONS["timm"] | {"num_classes": 7}, weights)
    jax.tree.map(
        np.testing.assert_array_equal, before["params"]["fc"], found["params"]["fc"]
    )
    wanted = convert_variables(weights, TRANSFORMER, OTHER)["params"]
    rest = {name: x for name, x in found["params"].items() if name != "fc"}
    jax.tree.map(np.testing.assert_array_equal, rest, wanted)
    assert rest["positions"]["table"].shape == (3, 3, 128)


def test_convert_writes_a_base_and_says_its_section(tmp_path, capsys):
    source, target = tmp_path / "w.npz", tmp_path / "base.safetensors"
    weights = weights_of("clip")
    write_weights(source, weights.arrays)
    main(["convert", f"--input={source}", f"--output={target}"])
    assert "'activation': 'quick_gelu', 'epsilon': 1e-05}" in capsys.readouterr().out
    network = open_network(target)
    wanted = convert_variables(weights, SECTIONS["clip"], SHAPE["clip"])
    jax.tree.map(np.testing.assert_array_equal, network.variables, wanted)
    assert network.model == SECTIONS["clip"] and network.image_shape == SHAPE["clip"]


HEAD = r"params/(?!fc/)"
FIRST_HALF = {
    "timm": r"params/(patches|positions|prefix|encoder/block[12]/)",
    "convnext": r"params/(stem|stage1|down2|stage2/block[12]/)",
    "resnet": r"params/(stem|stage[12])",
}


@pytest.mark.ci
@pytest.mark.parametrize("pattern", ["half", "head"])
@pytest.mark.parametrize("case", FIRST_HALF)
def test_half_of_the_blocks_or_all_but_the_head_is_frozen(case, pattern):
    pattern = FIRST_HALF[case] if pattern == "half" else HEAD
    height, width, _ = SHAPE[case]
    model = build_model(SECTIONS[case], SHAPE[case])
    variables = convert_variables(weights_of(case), SECTIONS[case], SHAPE[case])
    frozen, x = with_frozen(model, pattern, variables), images(height, width)
    moving = moving_variables(frozen, variables)
    kept = by_name(by_block_name(moving["params"]))
    assert all(not re.search(pattern, f"params/{name}") for name in kept)
    assert (set(kept) == {"fc/bias", "fc/kernel"}) == (pattern == HEAD)

    def loss(params, model, variables):
        return (model.apply({**variables, "params": params}, x)[0] ** 2).sum()

    def gradients(model, variables):
        of = functools.partial(loss, model=model, variables=variables)
        value, grads = jax.jit(jax.value_and_grad(of))(variables["params"])
        return value, by_name(by_block_name(grads))

    (value, grads), (wanted, whole) = (
        gradients(frozen, moving),
        gradients(model, variables),
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, grad in grads.items():
        scale = np.abs(whole[name]).max()
        np.testing.assert_allclose(grad, whole[name], rtol=1e-3, atol=1e-4 * scale)


def originals():
    """{case: the original's module}, of the packages themselves."""
    import timm
    import torch
    import transformers
    from timm.models.vision_transformer import VisionTransformer
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt
    from torchvision.models.resnet import Bottleneck, ResNet

    small = {"embed_dim": 128, "depth": 3, "num_heads": 2, "patch_size": 7}
    small |= {"img_size": 28, "dynamic_img_size": True}
    theirs = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    theirs |= {"image_size": 28, "patch_size": 7}
    norm = functools.partial(torch.nn.LayerNorm, eps=1e-5)
    config = transformers.Dinov2Config(**theirs)
    registers = transformers.Dinov2WithRegistersConfig(**theirs, num_register_tokens=4)
    clip = transformers.CLIPVisionConfig(
        **theirs, intermediate_size=96, projection_dim=16
    )
    stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 4)]
    return {
        "timm": VisionTransformer(**small, num_classes=5),
        "timm_registers": VisionTransformer(
            **{**small, "num_classes": 0, "init_values": 1e-5},
            reg_tokens=4,
            no_embed_class=True,
        ),
        "timm_mean": VisionTransformer(
            **small, num_classes=0, class_token=False, global_pool="avg"
        ),
        "timm_clip": VisionTransformer(
            **small, num_classes=6, pre_norm=True, norm_layer=norm
        ),
        "dinov2": transformers.Dinov2Model(config),
        "dinov2_registers": transformers.Dinov2WithRegistersModel(registers),
        "clip": transformers.CLIPVisionModelWithProjection(clip),
        "convnext": ConvNeXt(stages, num_classes=5),
        "timm_convnext": timm.create_model(
            "convnext_tiny", depths=[1, 4, 1, 1], dims=[8, 16, 24, 16], num_classes=5
        ),
        "resnet": ResNet(Bottleneck, [1, 1, 1, 1], num_classes=5),
    }


def ask(module, arrays, x):
    """Output of an original with the weights `arrays`."""
    import torch

    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    module.load_state_dict(state)
    with torch.no_grad():
        output = module.eval()(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    for word in ("image_embeds", "pooler_output"):
        output = getattr(output, word, output)
    return output.numpy()


def arrays_of(module):
    floats = {k: x.shape for k, x in module.state_dict().items() if x.ndim}
    return {name: drawn(name, tuple(shape)) for name, shape in floats.items()}


PACKAGES = ("torch", "torchvision", "timm", "transformers")


@functools.cache
def built_originals():
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is missing: make test-torch")
    return originals()


@cases
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_the_originals_say_the_same_of_their_own_files(case, tmp_path):
    module = built_originals()[case]
    arrays = arrays_of(module)
    names = {name: list(x.shape) for name, x in arrays.items()}
    assert names == json.loads(str(golden()[f"{case}/names"]))
    for height, width in (SHAPE[case][:2], *SIZES.get(case, ())):
        wanted = ask(module, with_counters(module, arrays), images(height, width))
        np.testing.assert_allclose(
            golden()[key_of(case, height, width)], wanted, rtol=1e-4, atol=1e-4
        )
    path = save(module, tmp_path)
    target = tmp_path / "base.safetensors"
    main(["convert", f"--input={path}", f"--output={target}"])
    section, shape = open_network(target).model, SHAPE[case]
    assert section == with_tuples(SECTIONS[case])
    found = run(section, shape, read_weights(path), images(*shape[:2]))
    wanted = golden()[key_of(case, *shape[:2])]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def with_counters(module, arrays):
    counters = {k: x.numpy() for k, x in module.state_dict().items() if not x.ndim}
    return {**arrays, **counters}


def save(module, folder):
    """A file as the package writes it."""
    import torch

    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder)
        return folder / "model.safetensors"
    torch.save(module.state_dict(), folder / "w.pth")
    return folder / "w.pth"


def make_golden():
    saved = {}
    for case, module in originals().items():
        arrays = arrays_of(module)
        names = {name: x.shape for name, x in arrays.items()}
        saved[f"{case}/names"] = np.array(json.dumps(names))
        for height, width in (SHAPE[case][:2], *SIZES.get(case, ())):
            state = with_counters(module, arrays)
            saved[key_of(case, height, width)] = ask(
                module, state, images(height, width)
            )
    np.savez_compressed(GOLDEN, **saved)


if __name__ == "__main__":
    make_golden()
