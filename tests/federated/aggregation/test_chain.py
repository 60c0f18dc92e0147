"""Links that clip, quantize and add noise, chains of them, and what is refused."""

import functools
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.federated.aggregation.clip import (
    centered_clip,
    clip_by_global_norm,
    gaussian_noise,
)
from fedfr_jax.federated.aggregation.compress import stochastic_quantize, top_k
from fedfr_jax.federated.aggregation.contract import chain, with_aggregation
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.aggregation.robust import (
    bucketing,
    median,
    nearest_neighbor_mixing,
    rfa,
)
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.programs import on_mesh, round_arguments
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.mesh import make_mesh
from tests.contracts import test_algorithms as contracts
from tests.federated.aggregation.played import aggregate, network_of, play_updates
from tests.federated.toys import (
    LOCAL,
    close,
    fedavg_of,
    feed,
    norm_loss,
    norm_variables,
    problem,
)

numbers = st.floats(-100, 100, width=32)
updates_of = st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=5, max_size=5)
few = settings(max_examples=25, deadline=None)
ORDERLESS = ("median", "trimmed_mean", "geometric_median", "attention")


@functools.cache
def compiled(name, **options):
    """Updates [K, 4], key -> what a chain with this link makes of them."""
    link = AGGREGATORS[name](**options)
    link = link if link.role != "link" else chain(link, weighted_mean())
    return jax.jit(lambda updates, key: aggregate(link, updates, key=key)[0])


@few
@given(updates_of, st.sampled_from([0.5, 20.0, 200.0]))
def test_no_clipped_update_is_longer_than_its_bound_and_short_ones_stay(rows, bound):
    for update in np.array(rows, np.float32):
        clip = compiled("clip_by_global_norm", max_norm=bound)
        found, norm = clip(update[None], 0), np.linalg.norm(update)
        assert np.linalg.norm(found) <= bound * (1 + 1e-5)
        scale = min(1, bound / norm) if norm else 1
        np.testing.assert_allclose(found, update * scale, rtol=1e-4, atol=1e-5)


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


@few
@given(updates_of, st.permutations(range(5)))
def test_no_rule_looks_at_the_order_of_clients(rows, order):
    updates = np.array(rows, np.float32)
    for name in ORDERLESS:
        one, other = (compiled(name)(x, 0) for x in (updates, updates[order]))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_chains_of_chains_are_chains_and_one_of_the_mean_has_no_state():
    updates = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    links = clip_by_global_norm(max_norm=1.5), centered_clip(), rfa(), weighted_mean()
    chains = chain(*links), chain(chain(*links[:2]), chain(*links[2:]))

    @jax.jit
    def rounds(updates):
        states, found = [None, None], []
        for _ in range(3):
            pairs = zip(chains, states, strict=True)
            ends = [aggregate(x, updates, state=state) for x, state in pairs]
            states = [state for _, state in ends]
            found.append([end for end, _ in ends])
        return found

    for plain, nested in rounds(updates):
        np.testing.assert_allclose(plain, nested, rtol=1e-6)
    assert chain(weighted_mean()).init is weighted_mean().init
    algorithm = fedavg(LOCAL)
    assert with_aggregation(algorithm) is algorithm


def program(algorithm):
    """What a round is lowered to."""
    mesh = make_mesh(2)
    sim = build_simulation(algorithm, feed(), *problem(), mesh=mesh)
    server = start_simulation(sim, norm_variables())
    arguments = round_arguments(
        sim,
        cohort_size=5,
        server=server,
        row=jax.eval_shape(algorithm.init_personal, sim.key, server),
        extra=on_mesh(mesh, empty_prepared(5)),
        table=sim.device_data,
    )
    return sim.programs.run_whole.lower(*arguments).as_text()


def test_a_chain_of_the_mean_alone_is_the_plain_round():
    algorithm = fedavg_of(norm_loss)
    linked = with_aggregation(algorithm, weighted_mean())
    clipped = with_aggregation(algorithm, clip_by_global_norm())
    assert program(linked) == program(algorithm) != program(clipped)


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
    clipped = with_aggregation(fedavg(LOCAL), clip_by_global_norm())
    ifca, finch = (contracts.MEMBERS[name].build() for name in ("ifca", "finch"))
    begin = lambda: with_aggregation(ifca, rfa()).init(
        contracts.MEMBERS["ifca"].variables
    )
    wrong = [
        (lambda: chain(median(), rfa(), weighted_mean()), "end with link 1.* 2 links"),
        (lambda: chain(weighted_mean(), median()), "must have exactly one mean, got 2"),
        (lambda: with_aggregation(clipped, median()), "replace the mean of .*fedavg"),
        (
            lambda: with_aggregation(with_aggregation(clipped, rfa()), rfa()),
            "must be one chain, got a second one around",
        ),
        (lambda: with_aggregation(ifca, median()), "replace the mean of .*ifca"),
        (begin, "cannot have a link with a center.*got 2"),
        (lambda: with_aggregation(finch, rfa()), "updates are summed, got .*finch"),
    ]
    for one in (nearest_neighbor_mixing(), bucketing()):
        wrong += [
            (lambda x=one: chain(rfa(), x), "needs a mean, or a rule .* link 2"),
            (lambda x=one: with_aggregation(ifca, x), "cannot replace the mean"),
            (
                lambda x=one: with_aggregation(fedavg(LOCAL), x, top_k()),
                "with error feedback before those",
            ),
        ]
    for make, words in wrong:
        with pytest.raises(ValueError, match=words):
            make()
