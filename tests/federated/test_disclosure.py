"""What leaves a client, as a run says it: never a personal leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.federated.aggregation.clip import centered_clip
from fedfr_jax.federated.aggregation.compress import rotate, sign, top_k
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.aggregation.exact_sum import quantize
from fedfr_jax.federated.aggregation.robust import median
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedavg import fedadam
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.disclosure import (
    count_communication,
    disclose,
    format_disclosure,
    trace_client,
)
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort, RoundContext
from tests.contracts import test_algorithms as contracts
from tests.federated import toys

MEMBERS, LOCAL = contracts.MEMBERS, contracts.LOCAL


def found_of(name, around=lambda algorithm: algorithm):
    """The disclosure of a member of the contract."""
    algorithm, variables = around(MEMBERS[name].build()), MEMBERS[name].variables
    return disclosure_of(algorithm, variables)


def disclosure_of(algorithm, variables):
    server = jax.eval_shape(algorithm.init, variables)
    row = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
    trace = trace_client(algorithm, server, row, context_of(Batching(4)))
    return disclose(algorithm, trace, row)


def context_of(batching):
    """What `prepare` gets for the contract's first three clients."""
    offsets = np.cumsum([0, *contracts.SIZES])
    population = Population(offsets, np.full(len(contracts.SIZES), 3, np.int32))
    cohort = Cohort(np.arange(3, dtype=np.int32), 0)
    return RoundContext(contracts.table(), population, cohort, batching, make_mesh(1))


def names(arrays):
    return [x.name for x in arrays]


SOME = {(f"personal {x}",) for x in ("fedavg", "fedfr", "fedrep", "mime", "ifca")}


@pytest.mark.parametrize("name", toys.others_are_slow(SOME, contracts.KEEPING))
def test_a_personal_leaf_never_appears_in_what_is_sent_or_received(name):
    found = found_of(name)
    leaf = "head" if name == "personal fedfr" else "bias"
    assert any(leaf in x for x in names(found.kept))
    moved = names(found.summed) + names(found.per_client) + names(found.trace.received)
    moved += names(found.trace.prepared) + names(found.trace.prepared_first)
    assert any("body" in x for x in moved)
    assert not [x for x in moved if leaf in x]
    assert leaf not in format_disclosure(name, found).partition("stays with")[0]


def test_who_sees_what_follows_from_the_aggregation():
    mean, median = found_of("fedavg"), found_of("linked median")
    exact, sparse = found_of("linked quantize"), found_of("linked top_k")
    update = names(mean.summed)
    assert "update/params/head" in update and not mean.per_client
    assert names(median.per_client) == update and not median.summed
    assert exact.is_exact and not mean.is_exact and not median.is_exact
    assert "a secure sum can hide" in format_disclosure("exact", exact)
    assert "each client's update" in format_disclosure("median", median)
    assert sparse.trace.communication.up < mean.trace.communication.up / 2
    assert names(sparse.kept) and not mean.kept  # the error stays
    assert names(mean.trace.received) == [
        x.replace("update", "server/variables") for x in update
    ]
    assert {"loss", "steps"} <= {*mean.trace.output.metrics}


def private(algorithm, **settings):
    """The algorithm with privacy for the contract's cohort."""
    numbers = {"clip_norm": 0.5, "noise_multiplier": 1.1, "cohort_size": 3}
    return ff.private(algorithm, ff.Privacy(**numbers, delta=1e-3, **settings))


def test_what_privacy_covers_is_said():
    found = found_of("fedavg", private)
    text = format_disclosure("private", found)
    assert "covers all that is summed, clipped to 0.5" in text and "1.1" in text
    assert "covers nothing" in format_disclosure("plain", found_of("fedavg"))
    follow = lambda x: private(x, clip_quantile=0.5, clip_count_std=2.0)
    follows = found_of("fedavg", follow)
    (bit,) = {*names(follows.summed)} - {*names(found.summed)}
    assert bit.startswith("links") and follows.summed[-1].shape == ()
    assert "quantile 0.5" in format_disclosure("follows", follows)


def test_what_clients_send_before_a_round_is_disclosed():
    """One gradient for each round of Mime and FedDANE, FedMargin's first prototypes."""
    change = {x.name: x.shape for x in found_of("fedavg").summed}
    for name in ("feddane", "mime"):
        found = found_of(name)
        gradient = {
            x.name.replace("prepare/shared", "update/params"): x.shape
            for x in found.trace.prepared
        }
        assert gradient and gradient.items() <= change.items()
        assert not found.trace.prepared_first
        assert {f"prepared/{x.removeprefix('update/params/')}" for x in gradient} <= {
            *names(found.trace.received)
        }
        assert "what each client sends for what it" in format_disclosure(name, found)
    margin = found_of("fedmargin")
    assert [x.shape for x in margin.trace.prepared_first] == [(3, 4), (3,)]
    assert not margin.trace.prepared and "the first round only" in format_disclosure(
        "", margin
    )
    public = found_of("kd")  # images that everybody has
    assert not public.trace.prepared and not public.trace.prepared_first
    assert not [x for x in names(public.trace.received) if x.startswith("prepared")]


def own_prepare(server, context):
    """A stranger's: an image of the clients, one of their number, one of nobody's."""
    images = context.dataset.images
    first, zeros = jax.jit(lambda x: (x[0], jnp.zeros(x.shape[1:])))(images)
    shared = {"first": first, "zeros": zeros, "model": server.variables["params"]}
    return empty_prepared(len(context.cohort.ids))._replace(shared=shared)


def reading(algorithm):
    """An algorithm whose clients read what `own_prepare` made."""

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        read = client.shared["first"].sum() + client.shared["zeros"].sum()
        return output._replace(metrics={**output.metrics, "read": read})

    return algorithm._replace(prepare=own_prepare, client_update=client_update)


def test_an_own_prepare_is_taken_as_what_it_computes():
    found = found_of("fedavg", reading)
    assert names(found.trace.prepared) == ["prepare/shared/first"]
    received = [x for x in names(found.trace.received) if x.startswith("prepared")]
    assert received == ["prepared/first"]
    plain = found_of("fedavg").trace.communication
    local = found_of("fedavg", lambda x: reading(x)._replace(prepare_is_local=True))
    assert not local.trace.prepared and local.trace.communication == plain
    assert np.subtract(found.trace.communication, plain).tolist() == [24, 24]


def test_quantize_is_recommended_where_it_is_taken():
    """As of all that the contract has: by adding it and tracing a client."""

    def taken(algorithm):
        return with_aggregation(algorithm, quantize())

    advised = {}
    for name in ("fedavg", "scaffold", "qfedavg", "fedmargin", "ifca", "feddane"):
        advised[name] = "`quantize`" in format_disclosure(name, found_of(name))
        try:
            is_taken = found_of(name, taken).is_exact
        except ValueError:
            is_taken = False
        assert advised[name] == is_taken, name
    assert advised["fedavg"] and not advised["fedmargin"]
    for name in ("clip_by_global_norm", "stochastic_quantize", "top_k", "quantize"):
        text = format_disclosure(name, found_of(f"linked {name}"))
        assert ("`quantize`" in text) == (name not in ("top_k", "quantize")), name
    assert "`quantize`" not in format_disclosure("", found_of("fedavg", private))


# --- Bytes, counted by hand from the shapes of the model

PARAMS, STATISTICS, HEAD = 4 * (6 * 4 + 4 * 3 + 3), 4 * 6, 4 * 4 * 3
MODEL = PARAMS + STATISTICS
PROTOTYPES = 4 * (3 * 4 + 3)  # three classes of four features, and their counts


def with_statistics():
    """The contract's model, whose statistics are of six numbers."""
    statistics = {"mean": np.zeros(6, np.float32)}
    return {**contracts.variables_of(0), "batch_stats": statistics}


def loss_of_statistics(variables, batch, key):
    """The contract's loss, with the statistics as they were but for a number."""
    stats = variables["batch_stats"]
    scalar = {**variables, "batch_stats": {"mean": stats["mean"].mean()}}
    loss, (new, metrics) = LOCAL.loss(scalar, batch, key)
    return loss, ({"mean": stats["mean"] + new["mean"]}, metrics)


def bytes_of(name, where=None, links=(), **settings):
    local = LOCAL._replace(loss=loss_of_statistics)
    algorithm = with_aggregation(ALGORITHMS[name](local, **settings), *links)
    algorithm = with_personal_layers(algorithm, where)
    return disclosure_of(algorithm, with_statistics()).trace.communication


CASES = {
    "fedavg": ({}, (MODEL, MODEL)),
    "an adaptive server": (
        {"name": "fedavg", "server_optimizer": fedadam(0.1)},
        (MODEL, MODEL),
    ),
    "scaffold": ({"num_clients": 5}, (MODEL + PARAMS, MODEL + PARAMS)),
    "fedper": (
        {"name": "fedavg", "where": "params/head"},
        (MODEL - HEAD, MODEL - HEAD),
    ),
    "local training": ({"name": "fedavg", "where": "."}, (0, 0)),
    "ditto": ({}, (MODEL, MODEL)),
    "ifca": ({"num_clusters": 3}, (MODEL, 3 * MODEL)),
    "a median": ({"name": "fedavg", "links": [median()]}, (MODEL, MODEL)),
    "a center": (
        {"name": "fedavg", "links": [centered_clip()]},
        (MODEL, MODEL + PARAMS),
    ),
    # 12 of 39 numbers with 6 bits for a place; a bit each and 32 for a leaf.
    "top_k": (
        {"name": "fedavg", "links": [top_k(fraction=0.3)]},
        (STATISTICS + 57, MODEL),
    ),
    "sign under a rule": (
        {"name": "fedavg", "links": [rotate(), sign(), median()]},
        (STATISTICS + 17, MODEL),
    ),
    "fedmargin": ({"model": contracts.MODEL}, (MODEL + PROTOTYPES, MODEL + PROTOTYPES)),
    "mimelite": ({}, (MODEL + PARAMS, MODEL + PARAMS)),
    # Before a round, the gradient of all examples; before the first, prototypes.
    "mime": ({}, (MODEL + 2 * PARAMS, MODEL + 2 * PARAMS)),
    "feddane": ({"mu": 0.1}, (MODEL + PARAMS, MODEL + PARAMS)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_round_are_those_of_what_is_sent(name):
    settings, expected = CASES[name]
    assert bytes_of(**{"name": name, **settings}) == expected


def test_an_array_in_two_places_is_sent_once():
    def twice(algorithm):
        def client_update(*arguments):
            output = algorithm.client_update(*arguments)
            return output._replace(update=(output.update, output.update))

        return algorithm._replace(client_update=client_update)

    assert (
        found_of("fedavg", twice).trace.communication
        == found_of("fedavg").trace.communication
    )


def test_a_stream_of_examples_changes_nothing_but_what_cannot_be_traced():
    images, labels = contracts.table().images, contracts.table().labels
    table = stream(lambda rows: images[rows], labels, memory=2**20)
    population = context_of(Batching(4)).population
    for name in ("fedavg", "mime"):
        parts = MEMBERS[name].build(), Batching(4), table, population
        sim = build_simulation(*parts, mesh=make_mesh(2))
        server = start_simulation(sim, MEMBERS[name].variables)
        sent = count_communication(sim, server, open_store(sim, server).template)
        assert sent == (None if name == "mime" else found_of(name).trace.communication)
