"""Local training of a method: optimizer, rate, frozen leaves, personal leaves first."""

import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.local import (
    by_block,
    layer_wise,
    round_decay,
    sgd,
    step_decay,
)
from fedfr_jax.schema import call, check_keys, keywords, naming
from fedfr_jax.tasks.methods import LOCAL_KEYS, Method, named
from fedfr_jax.types import LocalTraining

# Optimizers of optax's that move every number by its own gradients, whatever its leaf.
ELEMENTWISE = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "lion", "nadam", "nadamw", "radam", "rmsprop", "yogi"),
)


def build_local(method: Method, loss: Callable) -> LocalTraining:
    """Build the `LocalTraining` of a method.

    Raises:
      ValueError: for an unknown optimizer, or settings that it does not have.
    """
    optimizer = _optimizer_of(method)
    if method.learning_rate_multipliers:
        optimizer = layer_wise(optimizer, method.learning_rate_multipliers)
    rate = step_decay(method.learning_rate, every=method.decay_epochs)
    falls = {"rounds": method.decay_rounds, "factor": method.decay_factor}
    rate = round_decay(rate, **falls)

    def clipped(rate):
        return optax.chain(optax.clip_by_global_norm(method.clip_norm), optimizer(rate))

    return LocalTraining(loss, clipped if method.clip_norm else optimizer, rate)


def local_from_settings(
    section: str, settings: Mapping, loss: Callable
) -> LocalTraining:
    """Build local training from a section that has the keys LOCAL_KEYS of a method.

    Raises:
      ValueError: for another key, or a value that `Method` does not allow.
    """
    check_keys(f"config.{section}", settings, LOCAL_KEYS)
    method = call(section, Method, settings)
    with naming(f"config.{section}"):
        return build_local(method, loss)


def _optimizer_of(method: Method) -> Callable:
    """Build rate -> optax transformation."""
    settings = named(method.optimizer, "sgd")
    name = settings.pop("name")
    outside = {"momentum": method.momentum, "weight_decay": method.weight_decay}
    if name == "sgd":
        check_keys("optimizer sgd", settings, keywords(sgd))
        return sgd(**{**outside, **settings})
    for key, value in outside.items():
        if value:
            raise ValueError(
                f"{key} must be set inside `optimizer` for {name}, got {value} outside."
            )
    make = _of_optax(name, settings)
    return make if name in ELEMENTWISE else by_block(make)


def _of_optax(name: str, settings: Mapping) -> Callable:
    """Build rate -> optax.<name>(rate, **settings)."""
    factory = getattr(optax, name, None)
    parameters = inspect.signature(factory).parameters if callable(factory) else {}
    if "learning_rate" not in parameters:  # not an optimizer
        raise ValueError(
            f"optimizer must be the name of an optax optimizer, got {name!r}."
        )
    check_keys(f"optimizer {name}", settings, set(parameters) - {"learning_rate"})
    make = lambda rate: factory(rate, **settings)
    one = jax.ShapeDtypeStruct((), jnp.result_type(float))
    try:  # a step of one number: optax itself looks at few of its settings
        jax.eval_shape(lambda x: make(0.1).update(x, make(0.1).init(x), x), one)
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be built with the settings {settings}: {error}."
        ) from error
    return make
