"""Files of pretrained bases: the names of timm, transformers and torchvision.

Vision transformers (timm; DINOv2 of Meta and of transformers, with or without
registers; CLIP's image tower of transformers; InsightFace's faces) and ConvNeXt (timm,
torchvision) by our names and in our layouts. What belongs to other networks of the file
(CLIP's text) or to pretraining alone (the token of masked patches) is left out.

Positions are for the patches of one image size. For another they are resized by bicubic
interpolation with antialiasing, as in timm. Deviation: Meta's and transformers' DINOv2
without registers, and transformers' CLIP, interpolate without antialiasing.
"""

import inspect
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from fedfr_jax.models.norm import EPSILON
from fedfr_jax.models.vision_transformer import vision_transformer

Arrays = Mapping[str, np.ndarray]

UNUSED = r"text_model\.|text_projection|logit_|.*position_ids"
UNUSED += r"|(dinov2(_with_registers)?\.)?(embeddings\.)?mask_token"
VIT = (  # (regular expression, what takes its place), one after another
    (r"^(vision_model|dinov2(_with_registers)?)\.", ""),
    (r"^embeddings\.", ""),
    (r"^patch_embed(\.proj|ding|dings\.projection)\.", "patches."),
    (r"^class_embedding$", "cls_token"),
    (r"^register_tokens$", "reg_token"),
    (r"^position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(layernorm|post_layernorm|fc_norm)\.", "norm."),
    (r"^(head|classifier)\.", "fc."),
    (r"^visual_projection\.", "embedding."),
    (r"^feature\.(\d)\.", lambda m: f"{('fc1', 'bn1', 'fc2', 'bn2')[int(m[1]) % 4]}."),
    (
        r"^(blocks|encoder\.layers?)\.(\d+)\.",
        lambda m: f"encoder.block{int(m[2]) + 1}.",
    ),
    (r"\.(attention\.output\.dense|self_attn\.out_proj|attention\.o_proj)\.", ".proj."),
    (r"\.(attention\.attention|attention|self_attn|attn|mlp)\.", "."),
    (r"\.(query|q_proj)\.", ".qkv.0."),
    (r"\.(key|k_proj)\.", ".qkv.1."),
    (r"\.(value|v_proj)\.", ".qkv.2."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"\.(layer_scale|ls)(\d)\.", r".scale\2."),
)
CONVNEXT = (
    (r"^features\.0\.", "stem."),
    (
        r"^features\.(\d+)\.",
        lambda m: f"stages.{int(m[1]) // 2}.{('downsample', 'blocks')[int(m[1]) % 2]}.",
    ),
    (r"^stages\.(\d+)\.downsample\.0\.", lambda m: f"down{int(m[1]) + 1}.norm."),
    (r"^stages\.(\d+)\.downsample\.1\.", lambda m: f"down{int(m[1]) + 1}.conv."),
    (
        r"^stages\.(\d+)\.blocks\.(\d+)\.",
        lambda m: f"stage{int(m[1]) + 1}.block{int(m[2]) + 1}.",
    ),
    (r"^stem\.0\.", "stem.conv."),
    (r"^stem\.1\.", "stem.norm."),
    (r"\.(conv_dw|block\.0)\.", ".conv."),
    (r"\.block\.2\.", ".norm."),
    (r"\.(mlp\.fc1|block\.3)\.", ".fc1."),
    (r"\.(mlp\.fc2|block\.5)\.", ".fc2."),
    (r"\.(gamma|layer_scale)$", ".scale.gamma"),
    (r"^(head\.norm|classifier\.0)\.", "norm."),
    (r"^(head\.fc|classifier\.2)\.", "fc."),
)
FAMILIES = (  # (what a name of this family alone has, its table)
    (r"patch_embed(\.|ding)", VIT),
    (r"^stages\.0\.blocks\.0\.conv_dw|^features\.1\.0\.block\.0", CONVNEXT),
)
LEAVES = {
    "weight": "scale",  # of vectors; others are kernels
    "gamma": "vector",
    "lambda1": "vector",
    "running_mean": "mean",
    "running_var": "var",
}
FACE_EPSILON = 2e-5  # of the norms of InsightFace's head
FACE_SIZE, FACE_HEADS = 112, 8
HEAD_DIM = 64  # of attention, but in
NUM_HEADS = {1280: 16, 1408: 16, 1664: 16}  # by width
IMAGE_SIZE = 224  # of the usual training of networks that take any
POSITIONS = "params/positions/table"


def is_base(arrays: Arrays) -> bool:
    """Whether arrays have the names of a family that this module knows."""
    return any(re.search(what, name) for what, _ in FAMILIES for name in arrays)


def our_arrays(arrays: Arrays) -> dict[str, np.ndarray]:
    """Arrays of a base by our names, such as params/patches/kernel, in our layouts."""
    is_of = lambda what: any(re.search(what, name) for name in arrays)
    table = next(table for what, table in FAMILIES if is_of(what))
    is_face = "feature.0.weight" in arrays
    renamed = {}
    for name, array in arrays.items():
        if re.match(UNUSED, name) or name.endswith("num_batches_tracked"):
            continue
        for pattern, replacement in table:
            name = re.sub(pattern, replacement, name)
        renamed[name] = array
    for name in [name for name in renamed if ".qkv.0." in name]:
        parts = [name.replace("qkv.0.", f"qkv.{i}.") for i in range(3)]
        if all(part in renamed for part in parts):
            parts = [renamed.pop(part) for part in parts]
            renamed[name.replace("qkv.0.", "qkv.")] = np.concatenate(parts)
    tokens = _tokens(renamed, is_face) if "pos_embed" in renamed else {}
    leaves = dict(_leaf(name, array) for name, array in renamed.items())
    if is_face:
        for norm in ("bn1", "bn2"):
            if (var := f"batch_stats/{norm}/var") in leaves:
                leaves[var] = leaves[var] + (FACE_EPSILON - EPSILON)
        if "mask_token" in arrays:
            leaves["params/mask_token/vector"] = arrays["mask_token"].ravel()
    return {**leaves, **tokens}


def _leaf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Our name and layout of an array."""
    *module, kind = name.split(".")
    kind = LEAVES.get(kind) or kind
    if kind == "scale" and array.ndim > 1:
        kind = "kernel"
        array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
    collection = "batch_stats" if kind in ("mean", "var") else "params"
    array = array.ravel() if kind == "vector" else array
    return "/".join([collection, *module, kind]), array


def _tokens(renamed, is_flat):
    """Positions of the patches, and the tokens before them; takes them of `renamed`.

    The first tokens, the class token alone or none at all have positions too: what the
    number of patches, a square, leaves.
    """
    width = renamed["pos_embed"].shape[-1]
    none = np.zeros((0, width), np.float32)
    rows = lambda name: renamed.pop(name, none).reshape(-1, width)
    positions, class_token, registers = map(
        rows, ("pos_embed", "cls_token", "reg_token")
    )
    prefix = np.concatenate([class_token, registers])
    for extra in (0, len(class_token), len(prefix)):
        side = math.isqrt(len(positions) - extra)
        if side**2 + extra == len(positions):
            break
    else:
        raise ValueError(
            f"weights must have positions of a square of patches, got {len(positions)}."
        )
    prefix[:extra] += positions[:extra]
    grid = positions[extra:]
    table = grid if is_flat else grid.reshape(side, side, width)
    return {
        POSITIONS: table,
        **({"params/prefix/table": prefix} if len(prefix) else {}),
    }


def resized(
    arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, np.ndarray]:
    """Arrays with the positions [h, w, E] of patches resized to those of `shapes`."""
    old, new = np.shape(arrays.get(POSITIONS, ())), shapes.get(POSITIONS, ())
    if old == new or not len(old) == len(new) == 3 or old[-1] != new[-1]:
        return arrays
    table = jax.image.resize(np.asarray(arrays[POSITIONS]), new, "cubic")
    return {**arrays, POSITIONS: np.asarray(table)}


def base_network(
    arrays: Arrays, names: Collection[str]
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """(config section `model`, input shape) of a base.

    What no array tells is as usual: 64 channels of a head of attention, and quick GELU
    in transformers' CLIP alone.

    Args:
      arrays: of `our_arrays`.
      names: of the file's arrays.
    """
    stages: dict[str, int] = {}
    for name in arrays:
        if match := re.match(r"params/(\w+)/block(\d+)/", name):
            stages[match[1]] = max(stages.get(match[1], 0), int(match[2]))
    classes = arrays.get("params/fc/bias")
    more = {} if classes is None else {"num_classes": len(classes)}
    try:
        if POSITIONS not in arrays:
            return _convnext(arrays, stages, more)
        return _transformer(arrays, stages["encoder"], names, more)
    except KeyError as error:
        raise ValueError(
            f"weights must have the array {error}, got {sorted(arrays)[:4]}: name the "
            "network."
        ) from error


def _shape(arrays, name):
    """Shape [h, w, C', C] of a convolution."""
    shape = arrays[name].shape
    if len(shape) != 4 or 0 in shape:
        raise ValueError(f"{name} must have 4 axes with elements, got shape {shape}.")
    return shape


def _convnext(arrays, stages, more):
    stages = dict(sorted(stages.items()))
    biases = [arrays[f"params/{stage}/block1/fc2/bias"] for stage in stages]
    channels = _shape(arrays, "params/stem/conv/kernel")[2]
    section = {"blocks": [*stages.values()], "widths": [len(x) for x in biases]}
    shape = (IMAGE_SIZE, IMAGE_SIZE, channels)
    return {"name": "convnext", **section, **more}, shape


def _transformer(arrays, depth, names, more):
    patch, _, channels, width = _shape(arrays, "params/patches/kernel")
    section = {"width": width, "depth": depth, "patch_size": patch}
    side = math.isqrt(arrays[POSITIONS].size // width)
    size, block = side * patch, "params/encoder/block1"
    if "params/fc1/kernel" in arrays:
        size = FACE_SIZE if FACE_SIZE // patch == side else size
        dim = arrays["params/fc2/kernel"].shape[1]
        section |= {"num_heads": FACE_HEADS, "embedding_dim": dim}
        return {"name": "vit", **section}, (size, size, channels)
    num_prefix = len(arrays.get("params/prefix/table", ()))
    hidden = len(arrays[f"{block}/fc1/bias"])
    projection = arrays.get("params/embedding/kernel")
    has_name = lambda word: any(word in name for name in names)
    pre_norm = "params/norm_pre/scale" in arrays
    facts = {
        "num_heads": NUM_HEADS.get(width, max(width // HEAD_DIM, 1)),
        "hidden_dim": None if hidden == 4 * width else hidden,
        "embedding_dim": None if projection is None else projection.shape[1],
        "class_token": num_prefix > 0,
        "registers": max(num_prefix - 1, 0),
        "pool": "class" if num_prefix else "mean",
        "layer_scale": 1e-5 if f"{block}/scale1/vector" in arrays else 0.0,
        "pre_norm": pre_norm,
        "qkv_bias": f"{block}/qkv/bias" in arrays,
        "activation": "quick_gelu" if has_name("pre_layrnorm") else "gelu",
        "epsilon": 1e-5 if pre_norm else 1e-6,
    }
    if has_name("fc_norm."):
        facts["pool"] = "mean_first"
    usual = inspect.signature(vision_transformer).parameters
    section |= {k: x for k, x in facts.items() if x != usual[k].default}
    return {"name": "vision_transformer", **section, **more}, (size, size, channels)
