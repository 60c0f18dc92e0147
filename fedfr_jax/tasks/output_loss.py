"""The key `loss` of a method: what a task reads of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.contract import Margin
from fedfr_jax.parts import Built, Factory, Part, read_name
from fedfr_jax.schema import keywords
from fedfr_jax.types import Model

OWN = "cross_entropy"  # beside the names of LOSSES


class LossReader(NamedTuple):
    """Reader of `loss`: the task's cross entropy, or a loss of LOSSES on logits."""

    own: Callable  # (model, *, ...) -> loss of a client
    mean: Callable  # (model, loss on outputs, *, ...) -> loss of a client

    def read(
        self, value: Any, where: str, mistakes: list[str]
    ) -> Callable[[Model], Callable] | None:
        """Read model -> loss of a client."""
        known = (OWN, *LOSSES)
        name, settings = read_name(value, OWN, where, mistakes, known)
        if name == OWN:
            return Factory(self.own, 1, name=OWN).read(settings, where, mistakes)
        if name is None:
            return None
        own = {k: settings.pop(k) for k in keywords(self.mean) if k in settings}
        mean = Factory(self.mean, 2).read(own, where, mistakes)
        loss = Built(Factory(LOSSES[name])).read(settings, where, mistakes)
        if isinstance(loss, Margin):
            mistakes.append(
                f"{where} must be a loss on logits, got {name!r}, a margin loss on "
                "cosines, which the task faces takes."
            )

        def loss_of(model: Model) -> Callable:
            check_shape(loss, name, model.embedding_dim)
            return mean(model, loss)

        return loss_of


class OnlyLossReader(NamedTuple):
    """Reader of `loss` in a task that has one: settings of it."""

    own: Callable  # (model, *, ...) -> loss of a client

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read model -> loss of a client."""
        if isinstance(value, Mapping) and "name" not in value or value == "":
            return Factory(self.own, 1).read(value or {}, where, mistakes)
        keys = sorted(keywords(self.own))
        rule = f"must be settings of the task's only loss, {keys}"
        mistakes.append(f"{where} {rule}, got {value!r}.")
        return None


def check_shape(loss: Callable, name: str, num_classes: int) -> None:
    """Raise ValueError for a loss that gives no number for every example."""
    outputs = jax.ShapeDtypeStruct((2, num_classes), jnp.float32)
    targets = jax.ShapeDtypeStruct((2,), jnp.int32)
    if (shape := jnp.shape(jax.eval_shape(loss, outputs, targets))) != (2,):
        raise ValueError(
            f"loss must return one value per example, shape (2,) for two, got {shape} "
            f"from {name!r}."
        )
