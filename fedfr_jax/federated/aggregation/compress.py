"""Compression of clients' updates: sparsification and quantization.

The server sees the values that it would decode; `Aggregator.compress` counts the bits
of the message, see `federated.disclosure`. With error feedback a client adds to its
update the compression error of earlier messages (Seide et al. 2014; Karimireddy et al.
2019, arXiv:1901.09847): it keeps that error with its personal state, one update per
client who ever took part. Running statistics are sent as they are.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
from annotated_types import Interval

from fedfr_jax.data.permutation import permute
from fedfr_jax.federated.aggregation.contract import on_change, split
from fedfr_jax.ranges import PositiveShare, Seed
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator, LinkState, Message, Summary

Bits = Annotated[int, Interval(ge=1, le=23)]  # float32 keeps 23 exactly
BLOCK = 1024  # numbers that a rotation mixes with each other


@checked
def top_k(*, fraction: PositiveShare = 0.01, error_feedback: bool = True) -> Aggregator:
    """Send the k entries of largest magnitude; others are 0.

    Aji and Heafield 2017, arXiv:1704.05021. A message has k numbers and their places.

    Args:
      fraction: k of d numbers; k is at least 1.
      error_feedback: adds to an update what earlier messages have left out.
    """

    def compress(key, change):
        del key
        flat, unflatten = jax.flatten_util.ravel_pytree(change)
        _, index = jax.lax.top_k(jnp.abs(flat), count_sent(fraction, flat.size))
        return unflatten(only_at(flat, index))

    def count(message):
        size = sum(message.sizes)
        k = count_sent(fraction, size)
        return sparse_message(message, k, k * math.ceil(math.log2(max(size, 2))))

    return compressor(compress, count, error_feedback)


@checked
def random_k(
    *, fraction: PositiveShare = 0.01, error_feedback: bool = True
) -> Aggregator:
    """Send k random entries; others are 0.

    Konecny et al. 2016, arXiv:1610.05492, section 3 (random mask). The places follow
    from a seed, so that a message has k numbers and 32 bits.

    Args:
      fraction: k of d numbers; k is at least 1.
      error_feedback: adds to an update what earlier messages have left out. Without it
        what is sent is d / k times as large, which makes it unbiased.
    """

    def compress(key, change):
        flat, unflatten = jax.flatten_util.ravel_pytree(change)
        k = count_sent(fraction, flat.size)
        word = jax.random.bits(key, dtype=jnp.uint32)
        index = permute(word, jnp.arange(k, dtype=jnp.int32), jnp.int32(flat.size))
        scale = 1 if error_feedback else flat.size / k
        return unflatten(scale * only_at(flat, index))

    def count(message):
        return sparse_message(message, count_sent(fraction, sum(message.sizes)), 32)

    return compressor(compress, count, error_feedback)


def sign(*, error_feedback: bool = True) -> Aggregator:
    """Send the sign of each entry, times the leaf's mean magnitude.

    Bernstein et al. 2018, arXiv:1802.04434, with the scale of Karimireddy et al. 2019.
    A message has a bit for every number and 32 for every leaf; a number that is exactly
    0 stays 0 here.

    Args:
      error_feedback: adds to an update what earlier messages have left out.
    """

    def compress(key, change):
        del key
        return [jnp.abs(x).mean() * jnp.sign(x) for x in change]

    count = functools.partial(count_dense, bits=1, each=32)
    return compressor(compress, count, error_feedback)


@checked
def stochastic_quantize(*, bits: Bits = 8, error_feedback: bool = False) -> Aggregator:
    """Quantize each leaf to 2^bits levels from its minimum to its maximum.

    Suresh et al. 2017, arXiv:1611.00429, section 2.2 (k-level): a number is rounded to
    one of the two nearest levels at random, so that its expectation is the number.
    The server sees the levels' values. A message has so many bits for every number, and
    64 for the levels of a leaf.

    Args:
      bits: of a number, as many as float32 keeps exactly.
      error_feedback: adds to an update what earlier messages have left out, see above.
    """

    def compress(key, change):
        keys = optax.tree.split_key_like(key, change)
        return jax.tree.map(lambda k, x: to_levels(k, x, bits), keys, change)

    count = functools.partial(count_dense, bits=bits, each=64)
    return compressor(compress, count, error_feedback)


@checked
def rotate(*, seed: Seed = 0) -> Aggregator:
    """Rotate each leaf by random signs and a Hadamard matrix; the server rotates back.

    Suresh et al. 2017, arXiv:1611.00429, section 3: numbers of similar size lose
    less to the quantization behind it. Deviations: blocks of at most 1024 numbers are
    turned, each a power of two, so that nothing is padded; the signs are the same in
    all rounds, so that error feedback behind it stays in one basis.

    Args:
      seed: of the signs.
    """

    def turn_each(turn, tree):
        def turned(change):
            keys = optax.tree.split_key_like(jax.random.key(seed), change)
            return jax.tree.map(turn, keys, change)

        return on_change(turned, tree)

    def summarize(key, state, update, weight):
        del key, state
        return Summary(turn_each(rotated, update), weight), {}

    def finish(key, state, total):
        del key
        return turn_each(rotated_back, total.update), state, {}

    count = functools.partial(count_dense, bits=None, each=0)
    return Aggregator(summarize=summarize, finish=finish, compress=count)


def compressor(compress: Callable, count: Callable, error_feedback: bool) -> Aggregator:
    """Build a link that sends `compress(key, leaves) -> leaves` of an update.

    Args:
      count: Message -> Message.
      error_feedback: adds to an update what earlier messages have left out.
    """

    def summarize(key, state, update, weight):
        change, statistics, join = split(update)
        if isinstance(state, LinkState):
            errors = zip(change, state.personal, strict=True)
            change = [x + e.astype(x.dtype) for x, e in errors]
        sent = compress(key, change)
        error = [x - y for x, y in zip(change, sent, strict=True)]
        client_state = error if error_feedback else ()
        return Summary(join(sent, statistics), weight, personal=client_state), {}

    return Aggregator(
        summarize=summarize,
        init_personal=(lambda like: split(like)[0]) if error_feedback else None,
        compress=count,
    )


def only_at(flat: jax.Array, index: jax.Array) -> jax.Array:
    """`flat` [d] with all entries but those at `index` [k] set to 0."""
    return jnp.zeros_like(flat).at[index].set(flat[index], unique_indices=True)


def count_sent(fraction: float, size: int) -> int:
    """Number of entries sent out of `size`, at least 1."""
    return max(round(fraction * size), 1)


def sparse_message(message: Message, k: int, extra_bits: int) -> Message:
    """Message of k entries of all leaves together."""
    bits = max(message.bits, default=32)
    return Message((k,), (bits,), message.extra_bits + extra_bits, is_sparse=True)


def count_dense(message: Message, *, bits: int | None, each: int) -> Message:
    """Message with `bits` per entry (None: as before), `each` extra bits per leaf."""
    if message.is_sparse:
        raise ValueError(
            "aggregation must have sign, rotate and stochastic_quantize before top_k "
            "or random_k, got one after, which would fill the zeros. Change the order."
        )
    entry_bits = message.bits if bits is None else (bits,) * len(message.sizes)
    extra = message.extra_bits + each * len(message.sizes)
    return message._replace(bits=entry_bits, extra_bits=extra)


def to_levels(key: jax.Array, x: jax.Array, bits: int) -> jax.Array:
    """Quantize `x` to levels from its minimum to its maximum, without bias."""
    low = x.min()
    step = (x.max() - low) / (2**bits - 1)
    place = (x - low) / jnp.where(step > 0, step, 1)
    chance = jax.random.uniform(key, x.shape, x.dtype)
    return low + jnp.floor(place + chance) * step


def rotated(key: jax.Array, x: jax.Array) -> jax.Array:
    """Rotate `x` of any shape by random signs and orthogonal blocks."""
    flat = x.reshape(-1)
    signs = jax.random.rademacher(key, flat.shape, x.dtype)
    return hadamard_blocks(signs * flat).reshape(x.shape)


def rotated_back(key: jax.Array, y: jax.Array) -> jax.Array:
    """The inverse of `rotated` with the same key."""
    flat = y.reshape(-1)
    signs = jax.random.rademacher(key, flat.shape, y.dtype)
    return (signs * hadamard_blocks(flat)).reshape(y.shape)


def hadamard_blocks(x: jax.Array) -> jax.Array:
    """Multiply blocks of `x` [d] by H / sqrt(n): n = 1024, smaller at the end."""
    from scipy.linalg import hadamard  # slow to import

    done, parts = 0, []
    while done < x.size:
        size = min(BLOCK, 2 ** int(math.log2(x.size - done)))
        count = (x.size - done) // size
        part = x[done : done + count * size].reshape(count, size)
        turn = (hadamard(size) / math.sqrt(size)).astype(x.dtype)
        parts.append(jnp.matmul(part, turn, precision="highest").reshape(-1))
        done += count * size
    return jnp.concatenate(parts) if parts else x
