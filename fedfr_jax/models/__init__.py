"""Models: name -> factory(input_shape, ...) -> Model.

They end in an embedding (sphereface, iresnet, mobilefacenet, vit, vision_transformer,
convnext, cnn, mlp), in the logits of `num_classes` classes (resnet, reid, mobilenet,
linear_base, leaf_*, logistic; of those with an embedding all but the first four when
asked) or in logits for every pixel (segmenter, whose `remat` is its
encoder's). The inputs of tabular are rows of a table, and torch is a PyTorch module of
your own.

Unless a factory says otherwise:

Args:
  input_shape: (H, W, C).
  num_classes: M.
  embedding_dim: D.
  dtype: of the convolutions, such as "bfloat16"; None for that of the parameters.
    Normalization and linear layers compute in at least float32.
  scan_blocks: run stacks of equal blocks by a scan; False unrolls them.
  remat: training keeps only the input of every block, and computes the rest again.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedfr_jax.models.convnext import convnext
from fedfr_jax.models.heads import with_projection
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.linear_base import linear_base
from fedfr_jax.models.mobilefacenet import mobilefacenet
from fedfr_jax.models.mobilenet import mobilenet
from fedfr_jax.models.reid import reid
from fedfr_jax.models.resnet import resnet
from fedfr_jax.models.segmenter import segmenter
from fedfr_jax.models.small_networks import (
    cnn,
    leaf_celeba,
    leaf_femnist,
    logistic,
    mlp,
)
from fedfr_jax.models.sphereface import sphereface
from fedfr_jax.models.tabular import tabular
from fedfr_jax.models.torch_file import torch_file
from fedfr_jax.models.vision_transformer import vision_transformer
from fedfr_jax.models.vit import vit
from fedfr_jax.parts import call, choose
from fedfr_jax.schema import register
from fedfr_jax.types import InputShape, Model

MODELS = {
    "sphereface": sphereface,
    "iresnet": iresnet,
    "mobilefacenet": mobilefacenet,
    "vit": vit,
    "vision_transformer": vision_transformer,
    "convnext": convnext,
    "resnet": resnet,
    "mobilenet": mobilenet,
    "linear_base": linear_base,
    "reid": reid,
    "segmenter": segmenter,
    "cnn": cnn,
    "mlp": mlp,
    "leaf_celeba": leaf_celeba,
    "leaf_femnist": leaf_femnist,
    "logistic": logistic,
    "tabular": tabular,
    "torch": torch_file,
}


def build_model(settings: Mapping[str, Any], input_shape: InputShape) -> Model:
    """Build the model of the config section `model`.

    Args:
      settings: {"name": of MODELS, settings of its factory}, and perhaps `projection`.
    """
    settings = dict(settings)
    added = {key: settings.pop(key) for key in ("projection",) if key in settings}
    model = choose("config.model", MODELS, settings, input_shape)
    model = call("config.model", with_projection, added, model) if added else model
    return model._replace(config={**settings, **added})


def register_model(name: str, factory: Callable[..., Model]) -> None:
    """Register a factory (input_shape, *, ...) -> Model under a name for configs."""
    register(MODELS, "model", name, factory)
