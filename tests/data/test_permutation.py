"""Keyed permutations of [0, n), on the host and in jit."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.data import permutation
from fedfr_jax.data.permutation import permute, permute_on_host

PERMUTE = jax.jit(permute)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_host_permutation_is_a_bijection(n, key):
    places = permute_on_host(key, np.arange(n), n)
    np.testing.assert_array_equal(np.sort(places), np.arange(n))
    for few in (places[:0], places[-3:]):  # fewer numbers than digits
        np.testing.assert_array_equal(permute_on_host(key, few, n), places[few])


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_device_permutation_is_a_bijection_and_leaves_padding(n, key):
    index = np.arange(208, dtype=np.int32)
    places = np.asarray(PERMUTE(np.uint32(key), index, np.int32(n)))
    np.testing.assert_array_equal(np.sort(places[:n]), np.arange(n))
    np.testing.assert_array_equal(places[n:], np.arange(n, 208))


def test_a_gpus_walk_of_known_length_is_the_same_permutation(monkeypatch):
    index, key = jnp.arange(300, dtype=jnp.int32), jnp.uint32(5)
    sizes = jnp.array([1, 2, 3, 7, 10, 50, 101, 257, 273, 289, 300], jnp.int32)
    places = lambda: jax.jit(jax.vmap(lambda n: permute(key, index, n)))(sizes)
    walked = places()
    monkeypatch.setattr(permutation, "platform", lambda: "cuda")
    np.testing.assert_array_equal(places(), walked)


def test_every_place_is_about_equally_likely():
    draws = np.array([permute_on_host(k, np.arange(7), 7) for k in range(2100)])
    for place in range(7):
        counts = np.bincount(draws[:, place], minlength=7)
        assert abs(counts - 300).max() < 80  # five standard deviations
