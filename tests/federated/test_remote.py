"""Clients and a server apart, with nothing but arrays by name between them."""

import contextlib
import functools
import pickle
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import answers, remote
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Participation
from tests.contracts import test_algorithms as contract
from tests.federated import toys

pytestmark = pytest.mark.ci

SIZES, ROUNDS = (6, 9, 6, 9), 3
DATA = contract.table().take(np.arange(sum(SIZES)))
POPULATION = Population(np.cumsum([0, *SIZES]), np.full(len(SIZES), 3, np.int32))
PRIVATE = {"clip_norm": 0.5, "noise_multiplier": 0.5, "delta": 0.01}


class Method(NamedTuple):
    build: object
    variables: object = contract.variables_of(0)
    cohort_size: int = 3
    sampling: ff.Sampling = ff.Sampling()


def fedavg():
    return ff.fedavg(contract.LOCAL)


def scaffold():
    return ff.scaffold(contract.LOCAL, num_clients=len(SIZES))


def with_head(build):
    return lambda: ff.with_personal_layers(build(), contract.HEAD)


def aggregated(*links):
    return lambda: ff.with_aggregation(fedavg(), *(make() for make in links))


AGGREGATORS = ff.AGGREGATORS
METHODS = {
    "fedavg": Method(fedavg),
    "scaffold": Method(scaffold),
    "fedper": Method(with_head(fedavg)),
    "scaffold with a personal head": Method(with_head(scaffold)),
    "fedfr": Method(*contract.MEMBERS["fedfr"]),
    "quantized": Method(aggregated(AGGREGATORS["quantize"])),
    "top_k with error feedback": Method(
        aggregated(functools.partial(AGGREGATORS["top_k"], fraction=0.3))
    ),
    "median": Method(aggregated(AGGREGATORS["median"])),
    "statistics of a random client": Method(
        lambda: ff.with_batch_stats(fedavg(), "random_client")
    ),
    "private": Method(
        lambda: ff.private(fedavg(), ff.Privacy(cohort_size=2, **PRIVATE)),
        cohort_size=2,
        sampling=ff.Sampling("poisson"),
    ),
}
QUICK = {("scaffold with a personal head",), ("private",)}


def deployment(method, **options):
    """The method on four clients."""
    given = {
        "algorithm": method.build(),
        "variables": method.variables,
        "client_data": remote.client_data_of(DATA, POPULATION),
        "num_clients": len(SIZES),
        "batching": Batching(batch_size=4),
        "settings": Settings(
            method.cohort_size, (2, 1), seed=5, sampling=method.sampling
        ),
    }
    return remote.Deployment(**{**given, **options})


def leaves(cohort, number):
    """The first client that is asked leaves in the second round."""
    asked = remote.asked_clients(cohort)
    return asked[0] if number == 1 and len(asked) else None


class Rounds(NamedTuple):
    server: remote.RemoteServer
    state: object
    rows: dict  # {client: personal arrays}
    reply: remote.ClientReply  # the last
    task: remote.ClientTask
    metrics: dict


def apart(given):
    """Rounds of clients and a server that share nothing but arrays."""
    remote.check_deployment(given)
    train = remote.build_client(given)
    example = remote.describe_example(given.client_data(0).dataset)
    server = remote.build_server(given, example)
    state, rows = given.algorithm.init(given.variables), {}
    for number in range(ROUNDS):
        cohort, replies = server.cohort(number), {}
        arrays = server.arrays(state)
        tasks = server.tasks(cohort)
        for client, task in tasks.items():
            if client != leaves(cohort, number):
                own = rows.get(client, {})
                reply, rows[client] = train(client, task, arrays, own)
                replies[client] = reply
        answers, wrong = server.accept(replies, tasks)
        assert not wrong
        state, metrics = server.update(state, cohort, answers)
    return Rounds(server, jax.device_get(state), rows, reply, task, metrics)


def simulated(given, leaves=leaves):
    """The same rounds by the engine."""
    parts = given.algorithm, given.batching, DATA, POPULATION, given.settings
    sim, cohorts = build_simulation(*parts, mesh=make_mesh(1)), []
    for number in range(ROUNDS):
        cohort = before_round(sim, (), number)
        here = np.full(len(cohort.ids), True)
        part = cohort.participation or Participation(here, here)
        is_here = part.is_present & (cohort.ids != leaves(cohort, number))
        cohorts.append(cohort._replace(participation=Participation(is_here, is_here)))
    return toys.play(sim, given.variables, cohorts=cohorts)


@pytest.mark.parametrize("name", toys.others_are_slow(QUICK, METHODS))
def test_rounds_apart_are_those_of_the_simulation(name):
    """With a client that leaves; and nobody is handed more than it has to have."""
    given = deployment(METHODS[name])
    found = apart(given)
    expected = simulated(given)
    contract.assert_close(found.state, expected.server)
    assert not expected.is_new[[*found.rows]].any()
    for client, row in found.rows.items():
        own = answers.to_arrays(jax.tree.map(lambda x, i=client: x[i], expected.rows))
        contract.assert_close(dict(row), own)
    assert not np.array_equal(found.task.key, jax.random.key_data(jax.random.key(5)))
    if name == "private":  # its mechanism covers all that a client sends
        assert all(part.startswith("sum/") for part in found.reply.arrays)
        assert not found.reply.metrics
        epsilon = found.server.accountant.epsilon
        assert found.metrics["epsilon"][0] == epsilon(ROUNDS) > epsilon(ROUNDS - 1)
        return
    contract.assert_close(found.metrics["loss"], expected.logs[-1].metrics["loss"])
    if "head" in name or name == "fedper":
        assert not [part for part in found.reply.arrays if "head" in part]
    if name == "quantized":
        assert found.reply.arrays["sum/0/.update/params/body"].dtype == "int32"


@pytest.mark.parametrize(
    "algorithm, rule",
    [
        (
            ff.feddane(contract.LOCAL, mu=0.1),
            "fedavg. with the `prepare` of corrections needs a server",
        ),
        (
            fedavg()._replace(aggregator=None),
            "^the server needs updates that are",
        ),
    ],
)
def test_what_real_clients_cannot_do_is_refused_by_name(algorithm, rule):
    given = deployment(METHODS["fedavg"], algorithm=algorithm)
    with pytest.raises(ValueError, match=rule):
        remote.check_deployment(given)


def test_arrays_of_another_network_are_refused_and_bfloat16_comes_back():
    template = {"w": jnp.ones(3, jnp.bfloat16)}
    arrays = answers.to_arrays(template)
    stored = {"w": arrays["w"].view("V2")}  # what np.save makes of it
    assert answers.from_arrays(stored, template)["w"].dtype == jnp.bfloat16
    for wrong in ({"w": arrays["w"][:2]}, {"w": np.ones(3, np.float32)}):
        with pytest.raises(ValueError, match="^w must have dtype, .*'bfloat16'"):
            answers.from_arrays(wrong, template)


def test_a_private_server_has_the_epsilon_of_its_rounds_and_stops_at_the_budget():
    """Of a Gaussian for each round, in which all clients are."""
    import dp_accounting

    def epsilon(rounds):
        noise = PRIVATE["noise_multiplier"] / np.sqrt(rounds)
        return dp_accounting.get_epsilon_gaussian(noise, PRIVATE["delta"])

    budget = (epsilon(2) + epsilon(3)) / 2
    build = lambda: ff.private(
        fedavg(), ff.Privacy(cohort_size=4, epsilon=budget, **PRIVATE)
    )
    given = deployment(Method(build, cohort_size=4))
    server, state, answers = first_round(given)
    for number in range(2):
        cohort = server.cohort(number)
        state, metrics = server.update(state, cohort, answers)
        np.testing.assert_allclose(metrics["epsilon"], epsilon(number + 1), rtol=1e-6)
    with pytest.raises(ValueError, match="^epsilon must stay within .* but round 3"):
        server.cohort(2)
    with pytest.raises(ValueError, match="^its count of unclipped updates must be"):
        remote.check_counts((np.float32(0.5), np.float32(1e9)))


def first_round(given):
    """(server, its first state, answers of all that are asked in round 1)."""
    server, state, replies, tasks = first_replies(given)
    answers, wrong = server.accept(replies, tasks)
    assert not wrong
    return server, state, answers


def first_replies(given):
    """(server, its first state, replies, tasks) of round 1."""
    train = remote.build_client(given)
    example = remote.describe_example(given.client_data(0).dataset)
    server = remote.build_server(given, example)
    state = given.algorithm.init(given.variables)
    tasks, arrays = server.tasks(server.cohort(0), "a"), server.arrays(state)
    replies = {k: train(k, task, arrays, {})[0] for k, task in tasks.items()}
    return server, state, replies, tasks


BODY, BIAS = "sum/0/.update/params/body", "sum/0/.update/params/bias"
SUMMED, OWN, IS_FINITE = "sum/0/.weight", "client/.weight", "client/.is_finite"


def with_array(name, change):
    """A reply in which `change` makes another array, or what travels, of one."""

    def changed(reply):
        sent = reply.arrays[name]
        return reply._replace(arrays={**reply.arrays, name: change(sent)})

    return changed


def with_metrics(**metrics):
    return lambda reply: reply._replace(metrics={**reply.metrics, **metrics})


class Travelled(NamedTuple):
    dtype: str
    shape: tuple
    data: bytes


def travelling(dtype, shape, data, name=BIAS):
    """An array of these words and bytes, whatever was there."""
    return with_array(name, lambda x: Travelled(dtype, shape, data))


def filled(name, value):
    return with_array(name, lambda x: np.full_like(x, value))


def both_weights(value):
    first, second = filled(SUMMED, value), filled(OWN, value)
    return lambda reply: second(first(reply))


PICKLE = pickle.dumps([print])
HOSTILE = {
    "another round's answer": (lambda x: x._replace(round=1), "must answer round 1 of"),
    "a flag for a round": (lambda x: x._replace(round=False), "must answer round 1 of"),
    "a missing array": (
        lambda x: x._replace(arrays={k: v for k, v in x.arrays.items() if k != BODY}),
        f"{BODY} is missing and nothing is too much",
    ),
    "one more array": (
        lambda x: x._replace(arrays={**x.arrays, "\x1b[2J" * 99: x.arrays[BODY]}),
        r"nothing is missing and \\x1b\[2J",
    ),
    "another dtype": (with_array(BODY, lambda x: x.astype("f8")), "must have dtype"),
    "another shape": (with_array(BODY, lambda x: x.T.copy()), "must have dtype"),
    "a pickle": (travelling("float32", (3,), PICKLE), "must have dtype"),
    "a huge shape": (travelling("float32", (9**12,), bytes(12)), "must have dtype"),
    "too few bytes": (travelling("float32", (3,), bytes(8)), "must have dtype"),
    "nan": (filled(BODY, np.nan), "must be finite, .* got nan"),
    "numbers that overflow": (filled(BODY, 3e38), "must be finite, .* got 3e.38"),
    "its own flag": (filled(IS_FINITE, False), "says that it is not"),
    "a flag of seven": (
        travelling("bool", (), b"\7", IS_FINITE),
        "must be bytes 0 or 1, got 7",
    ),
    "a negative weight": (both_weights(-5), "weight must be positive, got -5"),
    "no weight": (both_weights(0), "weight must be positive, got 0"),
    "a huge weight": (both_weights(1e9), "weight must be at most 900, got 1e.09"),
    "a huge weight of its own": (filled(OWN, 901), "weight must be at most 900"),
    "no metrics": (lambda x: x._replace(metrics={}), "metrics must be those of"),
    "one more metric": (with_metrics(more=1.0), "nothing is missing and more is too"),
    "a text for a loss": (with_metrics(loss="1.0"), "loss must be a float32"),
    "nan for a loss": (with_metrics(loss=np.nan), "loss must be .* got nan"),
    "a huge number": (with_metrics(loss=10**400), "loss must be .* got 1000*[.]{3}"),
}


def test_a_hostile_answer_is_left_out_and_the_round_is_that_of_the_others():
    """Whatever is wrong, in one line that says what; the server's memory is not asked
    for what it claims."""
    server, state, replies, tasks = first_replies(deployment(METHODS["fedavg"]))
    cohort, (bad, *others) = server.cohort(0), replies
    rest, wrong = server.accept({k: replies[k] for k in others}, tasks)
    assert not wrong and len(others) == 2
    expected, _ = server.update(state, cohort, rest)
    for name, (change, words) in HOSTILE.items():
        given = {**replies, bad: change(replies[bad])}
        found, wrong = server.accept(given, tasks)
        assert [*found] == others and [*wrong] == [bad], name
        assert re.search(words, wrong[bad]) and len(wrong[bad]) < 500, wrong
        assert wrong[bad].isprintable()
        new, _ = server.update(state, cohort, found, len(wrong))
        contract.assert_close(jax.device_get(new), jax.device_get(expected))
    everyone, wrong = server.accept(replies, tasks)
    assert len(everyone) == 3 and not wrong
    for share, is_right in [(0.0, True), (1.0, False)]:  # of a link that checks updates
        lane = everyone[bad].lane._replace(metrics={"dropped": np.float32(share)})
        with contextlib.nullcontext() if is_right else pytest.raises(ValueError):
            answers.check_is_kept(lane)


def test_a_round_without_enough_usable_answers_changes_nothing():
    """By the robust rule's least clients, or the share of updates that must be kept;
    of a rule that keeps all updates each copy of a weight counts."""
    given = deployment(METHODS["median"])
    server, state, replies, tasks = first_replies(given)
    kept = "client/.kept/1"
    first, *_ = replies
    found, wrong = server.accept(
        {**replies, first: filled(kept, -5)(replies[first])}, tasks
    )
    assert [*wrong] == [first] and "weight must be positive" in wrong[first]
    few = server._replace(
        deployment=given._replace(algorithm=given.algorithm._replace(min_kept=0.6))
    )
    cohort = server.cohort(0)
    few.update(state, cohort, found, num_wrong=1)
    for answered, num_wrong, least in [({}, 0, 1), (found, 2, 3)]:
        words = f"usable answers of at least {least} clients, got {len(answered)}"
        with pytest.raises(FloatingPointError, match=words):
            few.update(state, cohort, answered, num_wrong=num_wrong)


def test_weights_are_limited_by_their_median_or_by_the_setting():
    weighing = lambda *weights: {
        i: answers.Answer(None, None, (x, 1.0)) for i, x in enumerate(weights)
    }
    assert not answers.check_weights(weighing(5, 500))
    assert [*answers.check_weights(weighing(5, 7, 701, 700))] == [2]
    assert [*answers.check_weights(weighing(1e9, 5))] == [0]
    assert [*answers.check_weights(weighing(5, 7, 701), 6)] == [1, 2]
    assert not answers.check_weights(weighing(5, 701), 701) | answers.check_weights({})


def test_examples_of_a_node_are_shapes_and_nothing_else():
    text = remote.describe_example(DATA)
    assert answers.read_example(text).images.shape == (1, 6)
    for bad in (
        *(None, "", "[]", "{}", "[" * 9999, "1", text + " " * 10_000, text * 2),
        text.replace("6", "-6"),
        text.replace("6", "9" * 12),
        text.replace("float32", "object"),
        text.replace("inputs", "more"),
        text.replace("[6]", '"6"'),
    ):
        with pytest.raises(ValueError, match="^its examples must be shapes and dtypes"):
            answers.read_example(bad)
