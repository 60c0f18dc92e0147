"""Links that clip, quantize and add noise, chains of them, and what is refused."""

import functools
from functools import partial

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.clip import (
    centered_clip,
    clip_by_global_norm,
    gaussian_noise,
)
from fedfr_jax.federated.aggregation.compress import stochastic_quantize, top_k
from fedfr_jax.federated.aggregation.contract import chain
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.aggregation.robust import (
    bucketing,
    median,
    nearest_neighbor_mixing,
    rfa,
)
from tests.contracts import test_algorithms as contracts
from tests.federated.aggregation.played import aggregate, network_of, play_updates
from tests.federated.toys import (
    LOCAL,
    close,
)

ORDERLESS = ("median", "trimmed_mean", "geometric_median", "attention")


@functools.cache
def compiled(name, **options):
    """Updates [K, 4], key -> what a chain with this link makes of them."""
    link = ff.AGGREGATORS[name](**options)
    link = link if link.role != "link" else chain(link, weighted_mean())
    return jax.jit(lambda updates, key: aggregate(link, updates, key=key)[0])


def test_clipping_by_the_global_norm_is_flowers(golden):
    arrays = golden("fl_more")
    with jax.enable_x64(True):
        end = play_updates(arrays["rob_u"], clip_by_global_norm(max_norm=1.0))
        close(network_of(end.servers[0]), arrays["rob_norm_clip_1_mean"])
    is_long = np.linalg.norm(arrays["rob_u"], axis=1) > 1
    np.testing.assert_array_equal(end.metrics["clip_fraction"], is_long)


def test_a_quantized_number_is_the_number_itself_on_average():
    x = np.float32([[0, 0.1, 0.5, 1]])
    link = compiled("stochastic_quantize", bits=1)
    each = jax.jit(jax.vmap(lambda key: link(x, key)))
    found = np.asarray(each(np.arange(1000, dtype=np.int32)))
    np.testing.assert_allclose(found.mean(axis=0), x[0], atol=0.05)
    assert set(np.ravel(found)) == {0, 1}


def test_no_rule_looks_at_the_order_of_clients():
    updates = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    for name in ORDERLESS:
        one, other = (compiled(name)(x, 0) for x in (updates, updates[::-1]))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_noise_behind_the_mean_is_on_the_sum_and_before_it_on_the_mean():
    updates, weights = np.zeros((4, 10000), np.float32), np.full(4, 5.0)
    noise = gaussian_noise(std=2.0)
    before = jax.jit(partial(aggregate, chain(noise, weighted_mean())))
    behind = jax.jit(partial(aggregate, chain(weighted_mean(), noise)))
    noisy = lambda run, key: np.asarray(run(updates, weights, key=key)[0])
    on_mean, on_sum = noisy(before, 0), noisy(behind, 0)
    assert abs(np.std(on_mean) - 2) < 0.1 and abs(np.std(on_sum) - 2 / 20) < 0.005
    assert np.abs(on_mean - noisy(before, 1)).min() > 0


def test_links_leave_running_statistics_alone_but_for_rules_and_weights():
    """Clipped, quantized and noisy params beside the plain mean of statistics."""
    random = np.random.default_rng(0)
    values = {"w": random.normal(size=(3, 8)).astype(np.float32)}
    updates = {"params": values, "batch_stats": {"norm": values}}
    links = (
        clip_by_global_norm(max_norm=0.1),
        centered_clip(max_norm=0.1),
        stochastic_quantize(bits=2),
        gaussian_noise(std=1.0),
    )
    found, _ = aggregate(chain(*links, weighted_mean()), updates, np.arange(1.0, 4))
    mean = np.average(values["w"], axis=0, weights=np.arange(1.0, 4))
    statistics = found["batch_stats"]["norm"]["w"]
    np.testing.assert_allclose(statistics, mean, rtol=1e-5, atol=1e-6)
    assert np.abs(found["params"]["w"] - mean).max() > 0.1


def test_chains_that_make_no_sense_are_refused():
    clipped = ff.with_aggregation(ff.fedavg(LOCAL), clip_by_global_norm())
    ifca, finch = (contracts.MEMBERS[name].build() for name in ("ifca", "finch"))
    begin = lambda: ff.with_aggregation(ifca, rfa()).init(
        contracts.MEMBERS["ifca"].variables
    )
    wrong = [
        (lambda: chain(median(), rfa(), weighted_mean()), "end with link 1.* 2 links"),
        (lambda: chain(weighted_mean(), median()), "must have exactly one mean, got 2"),
        (
            lambda: ff.with_aggregation(clipped, median()),
            "replace the mean of .*fedavg",
        ),
        (
            lambda: ff.with_aggregation(ff.with_aggregation(clipped, rfa()), rfa()),
            "must be one chain, got a second one around",
        ),
        (lambda: ff.with_aggregation(ifca, median()), "replace the mean of .*ifca"),
        (begin, "cannot have a link with a center.*got 2"),
        (lambda: ff.with_aggregation(finch, rfa()), "updates are summed, got .*finch"),
    ]
    for one in (nearest_neighbor_mixing(), bucketing()):
        wrong += [
            (lambda x=one: chain(rfa(), x), "needs a mean, or a rule .* link 2"),
            (lambda x=one: ff.with_aggregation(ifca, x), "cannot replace the mean"),
            (
                lambda x=one: ff.with_aggregation(ff.fedavg(LOCAL), x, top_k()),
                "with error feedback before those",
            ),
        ]
    for make, words in wrong:
        with pytest.raises(ValueError, match=words):
            make()
