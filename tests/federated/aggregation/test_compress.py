"""Compression: error feedback and codes by hand-made numbers, and bits of messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.aggregation import compress
from fedfr_jax.federated.aggregation.compress import (
    random_k,
    rotate,
    sign,
    stochastic_quantize,
    top_k,
)
from fedfr_jax.federated.aggregation.contract import chain
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.types import LinkState, Message
from tests.federated.aggregation.played import aggregate
from tests.federated.toys import LOCAL, close


@pytest.fixture
def arrays(golden):
    return golden("compression")


def sent_and_errors(link, updates):
    """What a client sends in rounds of `updates` [R, d], and the error after each."""
    error, found = [np.zeros(updates.shape[1])], []
    send = jax.jit(lambda seed, *given: link.summarize(jax.random.key(seed), *given))
    for number, update in enumerate(updates):
        state = LinkState((), error)
        summary, _ = send(number, state, [update], np.ones(()))
        error = summary.personal
        found.append((summary.update[0], error[0]))
    return map(np.array, zip(*found, strict=True))


LINKS = {"topk": functools.partial(top_k, fraction=0.2), "sign": sign}


@pytest.mark.parametrize("name", LINKS)
def test_error_feedback_adds_what_was_left_out(arrays, name):
    make, updates = LINKS[name], arrays["ef_g"]
    with jax.enable_x64(True):
        sent, errors = sent_and_errors(make(), updates)
        close(sent, arrays[f"ef_{name}_sent"])
        close(errors, arrays[f"ef_{name}_error"])
        close(sent.sum(axis=0) + errors[-1], updates.sum(axis=0))
        link = chain(make(error_feedback=False), weighted_mean())
        close(aggregate(link, updates[:1])[0], arrays[f"noef_{name}"][0])


def test_random_numbers_are_k_of_all_and_without_feedback_unbiased(arrays):
    with jax.enable_x64(True):
        sent, errors = sent_and_errors(random_k(fraction=0.2), arrays["ef_g"])
        close(sent.sum(axis=0) + errors[-1], arrays["ef_g"].sum(axis=0))
        assert ((sent != 0).sum(axis=1) == 4).all()
        assert len({tuple(np.flatnonzero(row)) for row in sent}) > 1
        index = arrays["ef_randk_index"][0]
        only = jax.jit(compress.only_at)(arrays["ef_g"][0], index)
        close(np.asarray(only) * 5, arrays["noef_randk_unbiased"][0])
        link = random_k(fraction=0.2, error_feedback=False)
        send = lambda key: link.summarize(key, (), [jnp.ones(20)], 1.0)[0].update[0]

        @jax.jit
        def mean():
            keys = jax.random.split(jax.random.key(0), 2000)
            return jax.vmap(send)(keys).mean(axis=0)

        np.testing.assert_allclose(mean(), np.ones(20), atol=0.2)


def test_a_rotation_is_hadamards_and_its_way_back(arrays):
    with jax.enable_x64(True):
        padded = np.pad(arrays["had_x"], (0, 12))
        found = jax.jit(compress.hadamard_blocks)(arrays["had_signs"] * padded)
        close(found, arrays["had_y"])

        @jax.jit
        def there_and_back(x):
            turned = compress.rotated(jax.random.key(0), x)
            return turned, compress.rotated_back(jax.random.key(0), turned)

        x = np.random.default_rng(1).normal(size=(3, 700, 1))
        turned, back = map(np.asarray, there_and_back(x))
        close(np.linalg.norm(turned), np.linalg.norm(x))
        close(back, x)
        assert np.abs(turned - x).max() > 1


def test_rotated_numbers_lose_less_to_few_bits():
    """Of updates with one large number among small ones, on average over clients."""
    updates = np.random.default_rng(0).normal(size=(8, 4096)).astype(np.float32)
    updates[:, 0] = 100
    links = stochastic_quantize(bits=2), weighted_mean()
    errors = []
    for before in ([], [rotate()]):
        run = jax.jit(lambda x, links=(*before, *links): aggregate(chain(*links), x)[0])
        errors.append(np.linalg.norm(run(updates) - updates.mean(axis=0)))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(
    "links, bits",
    [
        ([top_k(fraction=0.01)], 10 * 32 + 10 * 10),  # of 1024 numbers
        ([random_k(fraction=0.01)], 10 * 32 + 32),
        ([sign()], 1024 + 2 * 32),
        ([stochastic_quantize(bits=4)], 4 * 1024 + 2 * 64),
        ([rotate(), stochastic_quantize(bits=1)], 1024 + 2 * 64),
        ([stochastic_quantize(bits=4), top_k(fraction=0.01)], 10 * 14 + 2 * 64),
    ],
)
def test_bits_of_a_message_are_counted(links, bits):
    assert chain(*links).compress(Message((1000, 24), (32, 32))).num_bits == bits


def test_links_that_would_fill_the_zeros_are_refused_behind_top_k():
    for link in (sign(), rotate(), stochastic_quantize()):
        with pytest.raises(ValueError, match="before top_k .*Change the order"):
            ff.with_aggregation(ff.fedavg(LOCAL), top_k(), link)
