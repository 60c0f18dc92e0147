"""The config's model, built and traced on an input's shape."""

import contextlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.models import MODELS
from fedfr_jax.models.heads import with_projection
from fedfr_jax.parts import INLINE, Member, Part, section
from fedfr_jax.ranges import MAX, Width
from fedfr_jax.schema import naming
from fedfr_jax.types import InputShape, Model, PyTree, input_structs

NAMES = {"reid": "reid", "segmentation": "segmenter"}  # of tasks with a usual network


def with_name(task: str, settings: Mapping) -> Mapping:
    """config.model with the task's default name, if it has none."""
    return {"name": NAMES[task], **settings} if task in NAMES else settings


class NetworkReader(NamedTuple):
    """Reader of a network: a member of MODELS, which waits for the input's shape."""

    default: str = ""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read the network's part."""
        reader = Member(MODELS, self.default, 1, later=("num_classes",))
        part = reader.read(value, where, mistakes)
        if part is not None and not is_dtype(dtype := part.settings.get("dtype")):
            mistakes.append(
                f"{where}.dtype must be None or the name of a floating dtype, got "
                f"{dtype!r}."
            )
        return part


@section
class NetworkConfig(NamedTuple):
    """Keys of config.model, those of a network alone."""

    network: Annotated[Part, NetworkReader(), INLINE]


@section
class ClassifierConfig(NamedTuple):
    """Keys of config.model in classification."""

    network: Annotated[Part, NetworkReader(), INLINE]
    projection: Width | None = None  # of two layers before the last


class BuiltNetwork(NamedTuple):
    """A model with the shapes of what it gives for one image."""

    model: Model
    output: jax.ShapeDtypeStruct  # [1, ...]
    features: jax.ShapeDtypeStruct | None


def build_network(
    network: Part, input_shape: InputShape, projection: int | None = None
) -> BuiltNetwork:
    """Build a network, and trace it on one input.

    Raises:
      ValueError: for settings that make no network, or one that cannot run.
    """
    model, config = network(input_shape), network.section
    if projection is not None:
        with naming(network.where):
            model = with_projection(model, projection=projection)
        config["projection"] = projection
    model = model._replace(config=config)
    if (size := model.embedding_dim) < 1:
        raise ValueError(f"config.model must have at least one output, got {size}.")
    run = model.apply_with_features or model.apply
    image = input_structs(input_shape)
    with naming("config.model", config):
        variables = jax.eval_shape(model.init, jax.random.key(0))
        check_sizes(variables)
        output, *features, _ = jax.eval_shape(
            lambda v, x: run(v, x, False), variables, image
        )
    return BuiltNetwork(gather(model), output, features[0] if features else None)


def is_dtype(dtype: Any) -> bool:
    """Whether it is None or the name of a floating dtype."""
    if dtype is None:
        return True
    if isinstance(dtype, str | type | jnp.dtype):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # NumPy's
            return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    return False


def check_sizes(variables: PyTree) -> None:
    """Raise ValueError for an array with more elements than int32 can count."""
    largest = max(jax.tree.leaves(variables), key=lambda leaf: math.prod(leaf.shape))
    if math.prod(largest.shape) > MAX:
        raise ValueError(
            f"config.model must have arrays of fewer than 2**31 elements, got one of "
            f"shape {largest.shape}."
        )
