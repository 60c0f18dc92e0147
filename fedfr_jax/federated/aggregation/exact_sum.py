"""Exact sums: updates quantized to integers, added modulo 2^32.

Integer addition is associative: the sum has the same bits for any number of devices,
lanes and processes, and in any order of the clients. Secure sums need integers as well,
see `examples/secure_sum.py`.
"""

import math
from collections.abc import Mapping
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval

from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import SUM, Aggregator, LogScaled, Message, PerClient, Summary

CLIPPED_SHARE = "clipped_share"  # metric of a client
MAX_CLIPPED_SHARE = 0.01  # of a round without a warning
INT32_MAX = 2**31 - 1
Levels = Annotated[int, Interval(ge=2, le=INT32_MAX)]


@checked
def quantize(*, range: Positive = 8.0, levels: Levels = 2**22) -> Aggregator:
    """Quantize summed values to integers by stochastic rounding.

    A client sends floor(x levels / (2 range) + u), u uniform in [0, 1), as int32; the
    server divides the sum by levels / (2 range). It comes after the mean, so x is the
    client's weight times its update, running statistics too; numbers outside [-range,
    range] are cut to it, and the metric `clipped_share` is their share (above 1 % a run
    warns once). The sum of
    weights has the same bits where they are whole numbers below 2^24 in all, such as
    numbers of examples.

    Args:
      range: > 0, of weight times update: with weights of examples, of sums over a
        client's examples.
      levels: whole numbers from -levels / 2 to levels / 2; K clients fit while
        K levels / 2 < 2^31.
    """
    scale, max_code = levels / (2 * range), math.ceil(levels / 2)

    def summarize(key, state, update, weight):
        del state
        is_leaf = lambda x: isinstance(x, LogScaled | PerClient)
        leaves = jax.tree.leaves(update, is_leaf=is_leaf)
        if any(map(is_leaf, leaves)):
            raise ValueError(
                "quantize needs updates that are summed plainly: it cannot be used "
                "with attention, nor with a rule that needs all updates."
            )

        def to_codes(x, k):
            uniform = jax.random.uniform(k, x.shape)
            codes = encode(jnp.clip(x, -range, range), uniform, scale)
            # float32 may round above the last level, from which max_clients follows.
            return jnp.clip(codes, -max_code, max_code)

        codes = jax.tree.map(to_codes, update, optax.tree.split_key_like(key, update))
        is_outside = [(jnp.abs(x) > range).sum() for x in leaves]
        number = max(sum(x.size for x in leaves), 1)
        metrics = {CLIPPED_SHARE: jnp.array(sum(is_outside), jnp.float32) / number}
        return Summary(codes, weight), metrics

    def finish(key, state, total):
        del key
        return jax.tree.map(lambda x: decode(x, scale), total.update), state, {}

    return Aggregator(
        summarize=summarize,
        finish=finish,
        role=SUM,
        max_clients=INT32_MAX // max_code,
        compress=as_int32,
    )


def clipping_warning(metrics: Mapping[str, np.ndarray]) -> str:
    """Warning for a round whose numbers `quantize` cuts to its range; "" without one.

    Args:
      metrics: {name: [K]} of the round.
    """
    shares = metrics.get(CLIPPED_SHARE, ())
    share = float(np.mean(shares)) if len(shares) else 0.0
    if share <= MAX_CLIPPED_SHARE:
        return ""
    return (
        f"quantize cuts {share:.1%} of the numbers that clients send to its range "
        f"(metric {CLIPPED_SHARE}). Raise its key `range`, of weight times update, or "
        "lower the learning rate."
    )


def encode(x: jax.Array, uniform: jax.Array, scale: float) -> jax.Array:
    """Encode `x` times `scale` as int32, rounded up or down by `uniform` in [0, 1)."""
    return jnp.floor(x * scale + uniform.astype(x.dtype)).astype(jnp.int32)


def decode(total: jax.Array, scale: float) -> jax.Array:
    """Decode a sum of int32 codes."""
    return total.astype(jnp.result_type(float)) / scale


def as_int32(message: Message) -> Message:
    """Message of int32 codes, as `Aggregator.compress`."""
    if message.is_sparse:
        raise ValueError(
            "aggregation cannot have quantize with top_k or random_k: in an exact sum "
            "all clients send all entries. Remove one of them."
        )
    return message._replace(bits=(32,) * len(message.sizes), extra_bits=0)
