"""What devices send each other in a round."""

import re

import jax
import pytest

from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.federated.simulation import start_simulation
from tests.federated import toys

pytestmark = pytest.mark.ci

SENDS = re.compile(
    r"= (.*) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)\("
)


@pytest.mark.parametrize(
    "name, cohort_size",
    toys.others_are_slow({("fedavg", 2), ("fedfr", 5)}, toys.TOYS, [2, 5]),
)
def test_devices_send_a_model_once_and_a_number_per_metric_and_client(
    name, cohort_size
):
    """One all-reduce in the compiled round, however large the cohort."""
    algorithm, variables = toys.TOYS[name]()
    sim = toys.build(algorithm, mesh=(4, 1), cohort_size=cohort_size, local_epochs=2)
    server, whole = start_simulation(sim, variables), sim.programs.run_whole
    arguments = round_arguments(sim, server)
    (sent,) = SENDS.findall(whole.lower(*arguments).compile().as_text())
    shapes = re.findall(r"f32\[([\d,]*)\]", sent)
    metrics = jax.eval_shape(whole, *arguments)[2]
    words = lambda x: ",".join(map(str, x.shape))
    if name == "fedfr":  # whose head and branch stay with the clients
        variables = server.inner.variables
    wanted = [*map(words, jax.tree.leaves(variables)), ""]  # and the total weight
    wanted += map(words, metrics.values())
    assert sorted(shapes) == sorted(wanted)
    assert all(x.shape == (cohort_size,) for x in metrics.values())


def test_reproducible_sums_are_sent_in_one_all_to_all_however_many_leaves():
    algorithm, variables = toys.TOYS["fedavg"]()
    assert len(jax.tree.leaves(variables)) > 1
    options = {"cohort_size": 5, "reproducible_sum": True}
    sim = toys.build(algorithm, mesh=(4, 1), **options)
    arguments = round_arguments(sim, start_simulation(sim, variables))
    text = sim.programs.run_whole.lower(*arguments).as_text()
    assert text.count("stablehlo.all_to_all") == 1
