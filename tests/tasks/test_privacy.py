"""Privacy, sampling and failing clients by the keys of a config."""

import pytest

from fedfr_jax.config.build import build
from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.disclosure import format_disclosure
from fedfr_jax.federated.privacy import Mechanism, Sampling, build_accountant
from fedfr_jax.federated.privacy.mechanism import accountant_of
from fedfr_jax.parts import named
from fedfr_jax.runs.shapes import disclose_stage
from fedfr_jax.runs.stages import build_stage_simulation, read_end

PRIVATE = {"clip_norm": 0.5, "delta": 1e-2, "epsilon": 4.0}


CLOCK = {"name": "log_normal"}


def config_of(privacy=None, **federation):
    method = {"learning_rate": 0.1} | ({} if privacy is None else {"privacy": privacy})
    return {
        "task": "classification",
        "data": {"name": "fake_data", "num_identities": 3, "image_size": 4},
        "partition": {"name": "iid", "num_clients": 6},
        "model": {"name": "mlp", "hidden_dim": 4},
        "federation": {
            "rounds": 3,
            "cohort_size": 2,
            "local_epochs": 1,
            "batch_size": 4,
            "flip_probability": 0.0,
            **federation,
        },
        "methods": {"row": method},
    }


@pytest.mark.parametrize("sampling", ["shuffle", "poisson", {"name": "fixed"}])
def test_the_noise_is_as_much_as_epsilon_asks_for(sampling):
    experiment = build(config_of(PRIVATE, sampling=sampling))
    algorithm = experiment.stages["row"].trainer.algorithm
    sampling_of_rounds = experiment.federation.sampling
    assert sampling_of_rounds.name == named(sampling)["name"]
    accountant = accountant_of(algorithm, sampling_of_rounds, 6, 2)
    assert accountant == experiment.stages["row"].trainer.accountant
    assert 3.9 < accountant.epsilon(3) <= 4.0 < accountant.epsilon(6)
    assert algorithm.privacy.cohort_size == 2


@pytest.mark.parametrize(
    "noise, levels", [("skellam", 2**14), ({"name": "skellam", "levels": 64}, 64)]
)
def test_skellam_noise_is_calibrated_and_described(noise, levels):
    given = {**PRIVATE, "noise": noise}
    experiment = build(config_of(given))
    accountant = experiment.stages["row"].trainer.accountant
    assert accountant.mechanism.clip_levels == levels
    assert 3.98 < accountant.epsilon(3) <= 4.0 < accountant.epsilon(6)
    plain = build(config_of(PRIVATE)).stages["row"].trainer.accountant
    noises = [x.mechanism.noise_multiplier for x in (accountant, plain)]
    assert noises[1] < noises[0] < 1.3 * noises[1]
    found = disclose_stage(experiment, "row")
    text = format_disclosure("row", found)
    assert found.is_exact
    assert "the server sees the sum over the cohort; a secure sum can hide" in text
    assert "in shares by the clients, for a secure sum" in text
    with pytest.raises(ValueError, match="row.privacy.*needs sampling 'shuffle' or"):
        build(config_of(given, sampling="poisson"))


def test_dropped_stragglers_are_asked_no_more_often_for_being_dropped():
    """Six clients, four asked and two received: one round an epoch, not three."""
    straggling = {"straggler_fraction": 0.5, "drop_stragglers": True}
    given = {**PRIVATE, "noise_multiplier": 4.0}
    experiment = build(config_of(given, cohort_size=4, **straggling))
    trainer = experiment.stages["row"].trainer
    assert trainer.algorithm.privacy.cohort_size == 2
    accountant = trainer.accountant
    everybody = Mechanism(6, 6, 4.0, 1e-2)
    assert accountant.epsilon(3) == build_accountant(everybody).epsilon(3)
    table = place_examples(experiment.task.dataset, experiment.mesh)
    sim = build_stage_simulation(experiment, trainer, table)
    assert sim.accountant == accountant  # of `fedfr train`, as `fedfr plan` has it


def test_a_small_cohort_stands_for_a_large_one_of_a_large_population():
    given = {**PRIVATE, "delta": 1e-6, "noise_multiplier": 1.0}
    large = {"noise_cohort_size": 1000, "population": 100_000}
    config = config_of({**given, **large}, sampling="poisson")
    trainer = build(config).stages["row"].trainer
    expected = Mechanism(100_000, 1000, 1.0, 1e-6, Sampling("poisson"))
    assert trainer.accountant.mechanism == expected._replace(num_sampled=1000)
    for privacy, message in (
        ({"noise_cohort_size": 1000}, "noise_cohort_size must be at most the 6 .*1000"),
        ({**large, "population": 999}, "noise_cohort_size must be at most the 999 "),
        ({**large, "delta": 1e-4}, "delta must be .*1 / N = 1e-05 of 100000 clients"),
        ({"population": 5, "delta": 1e-2}, "population must be .*6"),
    ):
        with pytest.raises(ValueError, match=f"privacy.{message}"):
            build(config_of({**given, **privacy}))


def test_a_budget_that_is_spent_early_ends_the_method_early(tmp_path):
    given = {**PRIVATE, "noise_multiplier": 1.0}
    trainer = build(config_of(given, rounds=50)).stages["row"].trainer
    end = read_end(trainer, 50, tmp_path)
    assert 0 < end < 50
    assert trainer.accountant.epsilon(end) <= 4 < trainer.accountant.epsilon(end + 1)
    assert build(config_of()).stages["row"].trainer.accountant is None


def test_files_that_lack_a_client_or_hours_are_named_before_anything_runs(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("client,gflops,download_mbps,upload_mbps\n0,1,20,5\n2,1,20,5\n")
    profiles = {"name": "csv", "path": str(path)}
    message = (
        "devices.csv must have a line for each of the 6 clients, got 0 for client 1"
    )
    with pytest.raises(ValueError, match=message):
        build(config_of(systems={"profiles": profiles}))
    path = tmp_path / "hours.csv"
    path.write_text("client,from,to\n0,0,5\n")
    there = {"profiles": CLOCK, "availability": {"name": "csv", "path": str(path)}}
    with pytest.raises(ValueError, match="hours.csv must have a line for each of the"):
        build(config_of(systems=there))


def test_an_asynchronous_step_has_the_clients_of_its_buffer():
    """More clients than whole numbers can be summed of; a buffer of two fits."""
    buffer = {"name": "fedbuff", "concurrency": 3, "buffer_size": 2}
    config = config_of(systems={"profiles": CLOCK, "asynchronous": buffer})
    config["methods"]["row"]["aggregation"] = {"name": "quantize", "levels": 2**30}
    config["federation"]["cohort_size"] = 0
    assert build(config).stages.keys() == {"row"}
