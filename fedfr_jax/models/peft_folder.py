"""LoRA adapters as a folder that PEFT opens: `PeftModel.from_pretrained(base, folder)`.

The base is a network of PyTorch whose modules have our names, `encoder.block1.qkv`, or
those that `rename` gives. A head that has moved is among PEFT's `modules_to_save`.
"""

import json
import os
import pathlib
from collections.abc import Callable

import numpy as np

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.models.frozen import whole_variables
from fedfr_jax.models.weights import write_weights
from fedfr_jax.types import Model, PyTree

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
HEAD = {"kernel": "weight", "bias": "bias"}  # leaves of a layer: PyTorch's names


def save_adapter(
    folder: str | os.PathLike,
    model: Model,
    variables: PyTree,
    rename: Callable[[str], str] = lambda module: module,
) -> None:
    """Write a model's LoRA adapters and its head, without the base.

    Args:
      model: of `with_adapter`.
      variables: of that model.
      rename: path of a module here, with points -> its name in PyTorch.

    Raises:
      ValueError: for another adapter, or a head of other layers than dense ones and
        convolutions.
    """
    if model.adapter is None or not model.adapter.rank:
        raise ValueError("adapter must be lora to be saved as PEFT's, got another.")
    whole = whole_variables(model, variables)["params"]
    leaves = trees.by_name(scanned_blocks.by_block_name(whole))
    moved = trees.by_name(scanned_blocks.by_block_name(variables["params"]))
    arrays, targets, heads = {}, [], []
    for path, leaf in leaves.items():
        name, _, kind = path.rpartition("/")
        module, x = rename(name.replace("/", ".")), np.asarray(leaf)
        if kind == "lora_a":
            targets.append(module)
            arrays[f"{PREFIX}{module}.lora_A.weight"] = _torch_layout(x)
        elif kind == "lora_b":
            is_conv = leaves[f"{name}/kernel"].ndim == 4
            x = x[None, None] if is_conv else x
            arrays[f"{PREFIX}{module}.lora_B.weight"] = _torch_layout(x)
        elif path in moved:
            if kind not in HEAD:
                raise ValueError(
                    f"a head must be of dense layers and convolutions, got {path}. "
                    "Export the merged network."
                )
            heads.append(module)
            arrays[f"{PREFIX}{module}.{HEAD[kind]}"] = _torch_layout(x)
    config = {
        "peft_type": "LORA",
        "r": model.adapter.rank,
        "lora_alpha": model.adapter.alpha,
        "target_modules": targets,
        "modules_to_save": sorted({*heads}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / WEIGHTS, arrays, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _torch_layout(x: np.ndarray) -> np.ndarray:
    """[..., I, O] as [O, I, ...], as PyTorch's layers have their weights."""
    if x.ndim < 2:
        return x
    *window, inputs, outputs = range(x.ndim)
    return x.transpose(outputs, inputs, *window)
