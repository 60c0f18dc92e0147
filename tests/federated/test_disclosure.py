"""What leaves a client, as a run says it: never a personal leaf."""

import jax
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.communication import trace_client
from fedfr_jax.federated.disclosure import disclose, format_disclosure
from fedfr_jax.federated.engine import empty_prepared
from tests.contracts import test_algorithms as contracts
from tests.federated import toys

MEMBERS = contracts.MEMBERS


def found_of(name, around=lambda algorithm: algorithm):
    """The disclosure of a member of the contract."""
    algorithm = around(MEMBERS[name].build())
    server = jax.eval_shape(algorithm.init, MEMBERS[name].variables)
    row = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
    given = server, row, empty_prepared(3), contracts.table()
    trace = trace_client(algorithm, Batching(4), max(contracts.SIZES), *given)
    return disclose(algorithm, trace, row)


def names(arrays):
    return [x.name for x in arrays]


KEEPING = [x for x in contracts.KEEPING if not MEMBERS[x].build().prepare]
SOME = {(f"personal {x}",) for x in ("fedavg", "fedfr", "fedrep", "scaffold", "ifca")}


@pytest.mark.parametrize("name", toys.others_are_slow(SOME, KEEPING))
def test_a_personal_leaf_never_appears_in_what_is_sent_or_received(name):
    found = found_of(name)
    leaf = "head" if name == "personal fedfr" else "bias"
    assert any(leaf in x for x in names(found.kept))
    moved = names(found.summed) + names(found.per_client) + names(found.received)
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
    assert sparse.communication.up < mean.communication.up / 2
    assert names(sparse.kept) and not mean.kept  # the error stays
    assert names(mean.received) == [
        x.replace("update", "server/variables") for x in update
    ]
    assert {"loss", "steps"} <= {*mean.metrics}


def test_what_privacy_covers_is_said():
    numbers = {"clip_norm": 0.5, "noise_multiplier": 1.1, "cohort_size": 3}
    made = lambda algorithm: ff.private(algorithm, **numbers, delta=1e-3)
    text = format_disclosure("private", found_of("fedavg", made))
    assert "covers all that is summed, clipped to 0.5" in text and "1.1" in text
    assert "covers nothing" in format_disclosure("plain", found_of("fedavg"))
