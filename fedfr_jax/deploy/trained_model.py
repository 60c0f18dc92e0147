"""Trained models, loaded from their weight files."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax.data.preprocessing import (
    from_pixels,
    metadata,
    preprocessing_from_metadata,
    sum_views,
)
from fedfr_jax.deploy.calibration import CURVE, parse_curve
from fedfr_jax.evaluation.verification import Roc
from fedfr_jax.models import build_model
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.saved_model import load_weights, named_arrays
from fedfr_jax.models.weights import Weights
from fedfr_jax.schema import naming
from fedfr_jax.types import InputShape, Model, Preprocessing, PyTree, is_image

FEATURES = {"output": "features"}  # metadata of models that embed by their features
ORIGIN = ("method", "client")  # metadata that exported files keep


class TrainedModel(NamedTuple):
    """A trained model that embeds images."""

    # (variables, images [B, H, W, C] as in training) -> [B, D], compiled when called
    apply: Callable
    variables: PyTree  # in host memory
    input_shape: InputShape  # (H, W, C) of images
    # The config's section `model`; None for a model with a client's personal layers.
    model: Mapping[str, Any] | None = None
    # ROC of the run's evaluation; None without one
    roc: Callable[[], Roc | None] | None = None
    metadata: Mapping[str, str] = MappingProxyType({})  # its origin
    recorded: Preprocessing | None = None  # of the training images; None if unknown
    is_of_features: bool = False  # `apply` gives `Model.features`, not its output

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of images: as recorded, else the default."""
        return self.recorded or Preprocessing()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of a model of images."""
        if not is_image(self.input_shape):
            raise ValueError(f"this needs a model of images, got {self.input_shape}.")
        return self.input_shape

    def embed(self, images: np.ndarray, *, batch_size: int = 64) -> np.ndarray:
        """Embed images: [n, D] float32, as compared in the run's evaluation.

        Args:
          images: uint8 [n, H, W, C], resized and aligned like the training images, see
            `deploy.face_images`; or float32 [n, D] for a model of vectors.
        """
        if isinstance(self.input_shape, Mapping):
            raise ValueError(
                "embed needs a model of images or of vectors, got a table's."
            )
        dtype = np.dtype(np.uint8 if is_image(self.input_shape) else np.float32)
        if images.dtype != dtype or images.shape[1:] != self.input_shape:
            expected = ", ".join(map(str, self.input_shape))
            raise ValueError(
                f"images must be {dtype} [n, {expected}], got {images.dtype} "
                f"{images.shape}."
            )
        preprocessing, embeddings = self.preprocessing, []
        embed = sum_views(functools.partial(self.apply, self.variables), preprocessing)
        for start in range(0, len(images), batch_size):
            part = images[start : start + batch_size]
            missing = min(batch_size, len(images)) - len(part)  # one shape: one compile
            inputs = np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1))
            if is_image(self.input_shape):
                inputs = from_pixels(inputs, preprocessing)
            embeddings.append(np.asarray(embed(inputs))[: len(part)])
        return np.concatenate(embeddings)

    @property
    def weights(self) -> Weights:
        """Leaves by name, with metadata to load them again."""
        if self.model is None:
            raise ValueError(
                "a model with a client's personal layers cannot be written as weights. "
                "Export it as .onnx or .stablehlo."
            )
        fields = {"model": self.model, "image_shape": self.input_shape}
        fields = {k: json.dumps(v) for k, v in fields.items()}
        about = {**self.metadata, **fields, **metadata(self.recorded)}
        about |= FEATURES if self.is_of_features else {}
        return Weights(named_arrays(self.variables), about)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model: 16 hexadecimal digits."""
        inputs = self.input_shape
        if self.recorded:
            inputs = (self.input_shape, self.recorded)
        digest = hashlib.sha256(repr(inputs).encode())
        for name, leaf in named_arrays(self.variables).items():
            digest.update(name.encode() + leaf.tobytes())
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        name = self.model["name"] if self.model else "with layers of a client's own"
        return f"TrainedModel({name}, images {self.input_shape}, {dict(self.metadata)})"


def open_network(path: str | os.PathLike, method: str | None = None) -> TrainedModel:
    """Load the model of a weights file, or of a stage's or run's folder.

    Args:
      method: as of `load_weights`.
    """
    return build_trained_model(load_weights(path, method), path)


def build_trained_model(
    weights: Weights,
    path: str | os.PathLike,
    model: Mapping | None = None,
    input_shape: InputShape | None = None,
) -> TrainedModel:
    """Build the model of weights, which are from `path`.

    Args:
      model: {"name": of MODELS, settings}; None finds it from names and shapes.
      input_shape: (H, W, C), likewise.
    """
    with naming(path):
        if model is None or input_shape is None:
            detected, detected_shape = detect_model(weights)
            model, input_shape = model or detected, input_shape or detected_shape
        shape: InputShape = input_shape
        if not isinstance(shape, Mapping):
            shape = tuple(shape)
        num_channels = 1 if isinstance(shape, Mapping) else shape[-1]
        variables = convert_variables(weights, model, shape)
        is_of_features = FEATURES.items() <= weights.about.items()
        apply = compile_embedding(
            build_model(deployment_config(model), shape), is_of_features
        )
        recorded = preprocessing_from_metadata(weights.about, num_channels)
    about = {k: weights.about[k] for k in ORIGIN if k in weights.about}
    return TrainedModel(
        apply=apply,
        variables=variables,
        input_shape=shape,
        model=model,
        roc=functools.partial(parse_curve, weights.about.get(CURVE, "")),
        metadata={"from": str(path), **about},
        recorded=recorded,
        is_of_features=is_of_features,
    )


def compile_embedding(model: Model, is_of_features: bool) -> Callable:
    """Compile (variables, images) -> embeddings as in evaluation."""

    def embed(variables, images):
        if is_of_features and model.apply_with_features:
            return model.apply_with_features(variables, images, False)[1]
        return model.apply(variables, images)[0]

    return jax.jit(embed)


def deployment_config(model: Mapping) -> dict:
    """A config's model for deployment: in float32."""
    return {key: value for key, value in model.items() if key != "dtype"}
