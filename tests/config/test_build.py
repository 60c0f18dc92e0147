"""What is built of a config."""

from fedfr_jax.config.build import build
from fedfr_jax.data.stream import place_examples
from fedfr_jax.runs.stages import build_stage_simulation
from tests.tasks import tiny


def test_a_method_may_have_local_epochs_of_its_own():
    given = tiny.config("faces", federation={"local_epochs": (10, 8, 6, 4)})
    given["methods"] = {
        "fedfr": {"local_epochs": (5, 2)},
        "fedavg": {"algorithm": "fedavg", "local_epochs": 7},
        "plain": {"algorithm": "fedavg"},
    }
    experiment, epochs = build(given), {}
    table = place_examples(experiment.task.dataset, experiment.mesh)
    for name in given["methods"]:
        trainer = experiment.stages[name].trainer
        sim = build_stage_simulation(experiment, trainer, table)
        epochs[name] = [sim.settings.epochs(r) for r in range(4)]
    wanted = {"fedfr": [5, 2, 2, 2], "fedavg": [7, 7, 7, 7], "plain": [10, 8, 6, 4]}
    assert epochs == wanted
