"""A row without clients: one network on the training images of all of them."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.schema import call, check_keys, naming
from fedfr_jax.tasks.classification.loss import cross_entropy
from fedfr_jax.tasks.data import feed_of
from fedfr_jax.types import Central, Model, PyTree

# Of faces only.
MARGIN = ("margin_loss", "scale", "margin", "margin_options", "interclass_threshold")
MARGIN += ("init",)


def central_row(
    name: str,
    options: Mapping,
    model: Model,
    apply: Callable,
    first: PyTree,
    num_rows: int,
    mesh: Mesh,
) -> Central:
    """A row of config.methods of the kind "central", but for its images.

    Args:
      options: keys of `Training` without those of a margin, and `label_smoothing`.
      apply: (variables, images) -> logits.
      first: the variables that every row starts from.
      num_rows: training images of all clients together.

    Raises:
      ValueError: for an unknown key, or a value out of its range.
    """
    section, options = f"methods.{name}", dict(options)
    known = {"kind", "label_smoothing", *Training._fields} - {*MARGIN}
    check_keys(f"config.{section}", options, known)
    smoothing = options.pop("label_smoothing", 0.0)
    options.pop("kind")
    training = call(section, Training, options)
    check_training(training, section, num_rows, mesh)
    with naming(f"config.{section}"):
        loss = cross_entropy(model, label_smoothing=smoothing)
        feed = feed_of(training, is_images=len(model.image_shape) == 3)
    return Central(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=num_rows,
        feed=feed,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, first),
        network=lambda variables: variables,
        network_apply=apply,
    )
