"""Keyed permutations of [0, n), for cohorts and for the order of examples.

A Feistel network over the digits (a, b) of an index in mixed radix, walked along its
cycle until it lands inside [0, n) (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). Element i of the permutation costs the same for n = 10 and n = 10^9,
whatever its place, and the same code runs on numpy arrays and inside jit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.mesh import GPUS, platform

# Enough to end inside: of up to 289 numbers at most 16 of the walked cycle lie outside,
# of more the chance to need another step is below 1e-19.
WALKS = 16
STEPS = np.arange(6, dtype=np.uint32) * np.uint32(0x9E3779B9)  # of the network


def _mix(x):
    """A 32-bit integer hash (xor-shift-multiply); x uint32, wraps around."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _feistel(x, mixed, a, b):
    """One pass of the Feistel network over (x // b, x % b); a bijection of [0, ab).

    Args:
      mixed: (step, digits) -> a hash of them below the radix of the other digit.
    """
    high, low = x // b, x % b
    for i in range(len(STEPS)):
        if i % 2:
            low = (low + mixed(i, high)) % b
        else:
            high = (high + mixed(i, low)) % a
    return high * b + low


def permute(key: jax.Array, index: jax.Array, n: jax.Array) -> jax.Array:
    """Images of `index` [...] under the permutation of [0, n) given by `key`.

    Args:
      key: [] uint32.
      index: [B] int32; entries outside [0, n) come back unchanged.
      n: [] int32, at least 1.

    Returns:
      [B] int32.
    """
    size = n.astype(jnp.uint32)
    a = jnp.ceil(jnp.sqrt(n.astype(jnp.float32))).astype(jnp.uint32)
    b = (size + a - 1) // a
    x = index.astype(jnp.uint32)
    inside, salts = x < size, _mix(key + STEPS)
    mixed = lambda i, digit: _mix(digit ^ salts[i]) % (b if i % 2 else a)
    walk = lambda x: jnp.where(x < size, x, _feistel(x, mixed, a, b))
    start = _feistel(jnp.where(inside, x, 0), mixed, a, b)
    if platform() in GPUS:  # which would ask the host after each step of the walk
        end = jax.lax.fori_loop(0, WALKS, lambda _, x: walk(x), start, unroll=True)
        inside &= end < size
    else:
        end = jax.lax.while_loop(lambda x: jnp.any(x >= size), walk, start)
    return jnp.where(inside, end, x).astype(jnp.int32)


def permute_on_host(key: int, index: np.ndarray, n: int) -> np.ndarray:
    """As `permute` in NumPy, for n up to 2^31: [B] int64 -> [B] int64."""
    with np.errstate(over="ignore"):
        a = np.uint32(np.ceil(np.sqrt(n)))
        b = np.uint32((n + int(a) - 1) // int(a))
        salts = _mix(np.uint32(key % 2**32) + STEPS)
        mixed = lambda i, digit: _mix(digit ^ salts[i]) % (b if i % 2 else a)
        if 4 * a <= len(index):  # far fewer digits than numbers: looked up
            radix = np.resize([a, b], (len(STEPS), 1))
            table = _mix(np.arange(a, dtype=np.uint32) ^ salts[:, None]) % radix
            mixed = lambda i, digit: table[i].take(digit)
        x = _feistel(np.asarray(index, np.uint32), mixed, a, b)
        while len(outside := np.flatnonzero(x >= n)):
            x[outside] = _feistel(x[outside], mixed, a, b)
    return x.astype(np.int64)
