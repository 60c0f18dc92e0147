"""The mechanism: what is clipped, noised and divided, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.clip import clip_by_global_norm
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.privacy.accountant import (
    Mechanism,
    affordable_rounds,
    build_accountant,
)
from fedfr_jax.federated.privacy.mechanism import (
    mechanism_of,
    next_clip_norm,
    private_mean,
)
from fedfr_jax.federated.privacy.skellam import Skellam
from fedfr_jax.federated.sampling import Sampling, sample_clients
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from tests.federated.aggregation.played import aggregate
from tests.federated.toys import (
    LOCAL,
    fedavg_of,
    feed,
    flat,
    norm_loss,
    norm_variables,
    play,
    problem,
    replay,
)

SKELLAM = Skellam(2**14, 0)
UPDATES = {
    "params": {"w": np.random.default_rng(0).normal(size=(6, 2, 3))},
    "batch_stats": {"m": np.random.default_rng(1).normal(size=(6, 4))},
}


def settings(**options):
    options = {"clip_norm": 1.0, "noise_multiplier": 0.0, **options}
    return ff.Privacy(**{"cohort_size": 6, "delta": 1e-3, **options})


def norms(updates):
    leaves = [x.reshape(len(x), -1) for x in jax.tree.leaves(updates)]
    return np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)


def test_whole_updates_are_clipped_and_divided_by_a_constant_whatever_the_weights():
    """Running statistics too; of 4 clients that took part where 6 are the mean."""
    first = jax.tree.map(lambda x: np.float32(x[:4]), UPDATES)
    found, _ = aggregate(private_mean(settings()), first, [1.0, 9, 2, 5])
    scale = np.minimum(1, 1 / norms(first))
    expected = jax.tree.map(lambda x: np.tensordot(scale, x, 1) / 6, first)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected
    )


def noise_of(key, **options):
    """What the mechanism adds to a sum of nothing, in 4,000 numbers."""
    nothing = {"x": np.zeros((6, 4000), np.float32)}
    link = private_mean(settings(clip_norm=0.5, **options))
    return np.asarray(aggregate(link, nothing, key=key)[0]["x"]) * 6


@pytest.mark.parametrize(
    "options, std",
    [
        ({}, 3.0 * 0.5),
        ({"is_local": True}, 3.0 * 0.5 * 6**0.5),  # the clients' own adds up
        ({"noise_cohort_size": 60}, 3.0 * 0.5 / 10),  # on the mean, that of 60
    ],
)
def test_noise_has_the_multipliers_part_of_the_clip_norm_once_on_the_sum(options, std):
    noise = noise_of(0, noise_multiplier=3.0, **options)
    np.testing.assert_allclose(noise.std(), std, rtol=0.05)
    other = noise_of(1, noise_multiplier=3.0, **options)  # of another round
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.1


def test_a_small_cohort_has_the_capacity_and_the_epsilon_of_the_large_one():
    given = settings(cohort_size=5, noise_multiplier=1.0, delta=1e-4)
    small = given._replace(noise_cohort_size=50, population=1000)
    large = given._replace(cohort_size=50)
    sampling = Sampling("poisson", capacity=6)
    mechanisms = (
        mechanism_of(small, sampling, 100, 5),
        mechanism_of(large, sampling._replace(capacity=60), 1000, 50),
    )
    assert mechanisms[0] == mechanisms[1]
    assert mechanisms[0].sampling.capacity == 60
    cut = build_accountant(mechanisms[0]).epsilon(3)
    whole = mechanisms[0]._replace(sampling=Sampling("poisson", capacity=1000))
    assert cut > 1.05 * build_accountant(whole).epsilon(3)  # clients are left out


def test_the_clip_norm_follows_the_quantile_as_andrew_et_al_have_it(golden):
    """It shrinks where more than the quantile is inside: Flower's sign is the other."""
    arrays = golden("privacy")
    for i, (_, quantile, rate) in enumerate(arrays["aclip_C0_gamma_eta"]):
        given = settings(
            clip_quantile=quantile, clip_learning_rate=rate, cohort_size=12
        )
        for j in range(8):
            for name in ("", "noisy_"):
                before, after = arrays[f"aclip_{name}C"][i, j : j + 2]
                count = (arrays[f"aclip_{name}b"][i, j] - 0.5) * 12
                found = next_clip_norm(before, count, given)
                np.testing.assert_allclose(found, after, rtol=1e-5)
    z, count_std = arrays["aclip_split_z"], arrays["aclip_split_sigma_b"]
    for i, j in np.ndindex(3, 3):
        given = settings(
            noise_multiplier=z[i], clip_quantile=0.5, clip_count_std=count_std[j]
        )
        np.testing.assert_allclose(given.noise_std, arrays["aclip_split_z_delta"][i, j])


@pytest.mark.parametrize("broken", [0.0, np.nan, 1e30])
def test_updates_that_are_not_clipped_are_counted_by_halves(broken):
    """Norms 0.5, 1 (as long as C) and 4; one that is no number counts as 0.

    Also of numbers whose squares are none.
    """
    link = private_mean(settings(clip_quantile=0.5, clip_count_std=1e-9))
    updates = np.array([[0.5, 0], [0, 1.0], [4.0, 0], [broken, 0]], np.float32)
    found, state = aggregate(link, {"x": updates})
    np.testing.assert_allclose(found["x"], [1.5 / 6, 1 / 6], rtol=1e-6)
    share = (3 * 0.5 - 0.5) / 6 + 0.5  # three of four are inside, of 6 expected
    np.testing.assert_allclose(state.clip_norm, np.exp(-0.2 * (share - 0.5)), rtol=1e-6)


def play_private(make, **options):
    """Servers of two rounds of `make`, clipped to almost nothing and without noise."""
    rng = np.random.default_rng(3)
    examples = [
        [rng.normal(size=(n, 5)) for n in (3, 4)],
        [np.arange(n) % 3 for n in (3, 4)],
    ]
    algorithm = ff.private(make, settings(cohort_size=2, **options))
    variables = {"params": {"W": np.zeros((5, 3)), "b": np.zeros(3)}, "batch_stats": {}}
    return replay(algorithm, examples, variables, rounds=2, where=(2, 1))


def test_scaffolds_drift_and_control_are_clipped_as_one_tree():
    with jax.enable_x64(True):
        played = play_private(ff.scaffold(LOCAL, num_clients=2), clip_norm=1e-3)
    first = played.servers[0].inner
    moved = [flat(first.variables), flat(first.direction)]
    # Two updates of length C in almost the same direction, of a control 10 times as
    # long as the drift at a rate of 0.1.
    assert 0.5e-3 < np.linalg.norm(np.concatenate(moved)) <= 1e-3 * (1 + 1e-6)
    assert np.linalg.norm(moved[1]) > 5 * np.linalg.norm(moved[0])
    np.testing.assert_allclose(played.metrics["clip_norm"], 1e-3)


def test_personal_leaves_are_not_sent_whichever_stands_outside():
    ends = []
    for order in ("inside", "outside"):
        algorithm, given = fedavg_of(norm_loss), settings(noise_multiplier=1.0)
        if order == "inside":
            algorithm = ff.with_personal_layers(
                ff.private(algorithm, given), "params/head"
            )
        else:
            algorithm = ff.private(
                ff.with_personal_layers(algorithm, "params/head"), given
            )
        server = algorithm.init(norm_variables())
        like = algorithm.update_like(server)
        ends.append(sorted(map(str, jax.tree.leaves(jax.tree.map(jnp.shape, like)))))
    assert ends[0] == ends[1] == sorted(["16", "16"])


def test_what_a_server_prepares_is_refused_before_it_runs_unless_it_is_local():
    """Whatever it returns: of a closure's examples no trace would find them."""
    calls = []

    def prepare(server, context):
        calls.append(context.cohort.round)
        mean = np.asarray(context.dataset.images).mean()
        return empty_prepared(len(context.cohort.ids))._replace(shared=mean)

    algorithm = fedavg_of(norm_loss)._replace(prepare=prepare)
    covered = ff.private(algorithm, settings(cohort_size=5))
    for around in (covered, ff.with_personal_layers(covered, "params/head")):
        with pytest.raises(
            ValueError, match="server prepares of the clients' examples"
        ):
            build_simulation(around, feed(), *problem(), mesh=make_mesh(1))
    covered = covered._replace(prepare_is_local=True)
    build_simulation(covered, feed(), *problem(), mesh=make_mesh(1))
    assert not calls


def test_a_cohort_of_nobody_leaves_noise():
    """The model moves by noise of its size, so that nobody learns that it was empty."""
    given = settings(noise_multiplier=3.0, cohort_size=1, clip_norm=0.5, delta=0.1)
    algorithm = ff.private(fedavg_of(norm_loss), given)
    sim = build_simulation(
        algorithm,
        feed(),
        *problem(),
        Settings(cohort_size=1, sampling=Sampling("poisson")),
        mesh=make_mesh(1),
    )
    drawn = lambda round: sample_clients(
        sim.settings.sampling, sim.settings.seed, round, 5, 1
    )[1]
    round = next(round for round in range(50) if not drawn(round).any())
    params = lambda tree: np.asarray(ravel_pytree(tree["params"])[0])
    end = play(sim, norm_variables(), first=round)
    moved = params(algorithm.global_model(end.server)) - params(norm_variables())
    assert len(end.logs[0].ids) == 0 and len(moved) > 50
    np.testing.assert_allclose(moved.std(), 3.0 * 0.5, rtol=0.3)


def test_what_is_sent_beside_the_update_is_refused_by_name():
    given = settings(cohort_size=5)
    random = ff.with_batch_stats(
        ff.private(fedavg_of(norm_loss), given), "random_client"
    )
    fair = ff.private(ff.qfedavg(LOCAL._replace(loss=norm_loss), q=1.0), given)
    for algorithm in (random, fair):
        sim = build_simulation(algorithm, feed(), *problem(), mesh=make_mesh(1))
        with pytest.raises(ValueError, match="sums beside the update, such as running"):
            play(sim, norm_variables())


def test_a_cohort_other_than_the_divisor_and_another_mean_are_refused():
    algorithm = ff.private(ff.fedavg(LOCAL), settings(cohort_size=4))
    words = "cohort_size must equal that of privacy, 4, .* got 5"
    with pytest.raises(ValueError, match=words):
        algorithm.check_cohort(5)
    clipped = ff.with_aggregation(ff.fedavg(LOCAL), clip_by_global_norm())
    with pytest.raises(ValueError, match="aggregates by a plain mean, got .*fedavg"):
        ff.private(clipped, settings())


WRONG = (
    ({"clip_norm": 0}, "clip_norm must be positive, got 0"),
    ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
    ({"delta": 0}, r"delta must be in \(0, 1\), got 0"),
    (
        {"clip_quantile": 0.5, "noise_multiplier": 2.0},
        "clip_count_std must be above half the noise multiplier of 2, got 0.3",
    ),
    (
        {"is_local": True, "noise_cohort_size": 100},
        "is_local cannot be set together with privacy.noise_cohort_size",
    ),
    (
        {"is_local": True, "clip_quantile": 0.5},
        "is_local cannot be set together with privacy.clip_quantile",
    ),
    ({"is_local": True, "noise": SKELLAM}, "is_local cannot .* with privacy.noise"),
    ({"noise_cohort_size": 60, "noise": SKELLAM}, "noise cannot .*noise_cohort_size"),
    ({"clip_quantile": 0.5, "noise": SKELLAM}, "noise cannot .*clip_quantile"),
    ({"noise": Skellam(2**14, 7)}, "at most the cohort_size of 6, got 7"),
    (
        {"noise": Skellam(2**20, 1), "noise_multiplier": 1.0},
        "levels must leave .* at most 65536, got",
    ),
)


def test_settings_that_give_no_guarantee_are_refused():
    for options, words in WRONG:
        with pytest.raises(ValueError, match=words):
            ff.private(ff.fedavg(LOCAL), settings(**options))


def test_a_private_run_resumes_to_the_same_bits_and_stops_at_its_budget(tmp_path):
    """Noise and clip norm are the server's; round 4 of 20 clients would overspend."""
    x = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    data = ff.FederatedDataset.from_client_ids(x, np.arange(40) % 3, np.arange(40) // 2)
    spent = [build_accountant(Mechanism(20, 20, 2.0, 1e-3)).epsilon(t) for t in (3, 4)]
    given = settings(
        noise_multiplier=2.0,
        cohort_size=20,
        clip_quantile=0.5,
        clip_count_std=2.0,
        epsilon=np.mean(spent),
    )
    local = LOCAL._replace(learning_rate=0.1)
    algorithm = ff.private(ff.fedavg(local), given)
    variables = {"W": jnp.zeros((5, 3)), "b": jnp.zeros(3)}
    run = ff.init(algorithm, data, variables, batch_size=2)
    middle, _ = ff.run_round(ff.run_round(run)[0])
    path = ff.save(middle, tmp_path / "run")
    end, metrics = ff.run_round(middle)
    again, _ = ff.run_round(ff.resume(run, path))
    jax.tree.map(np.testing.assert_array_equal, end.server, again.server)
    np.testing.assert_allclose(metrics["epsilon"], spent[0])
    with pytest.raises(
        ValueError, match="epsilon must stay within privacy.epsilon.* round 4 would"
    ):
        ff.run_round(end)
    given = run.sim.accountant
    assert affordable_rounds(given, 3) == affordable_rounds(given, 10) == 3
