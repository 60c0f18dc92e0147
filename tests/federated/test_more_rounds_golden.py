"""Two golden rounds of further methods, replayed through the real engine."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.afl import afl
from fedfr_jax.federated.algorithms.clipping import centred_clipping, norm_clipping
from fedfr_jax.federated.algorithms.combining import COMBINES
from fedfr_jax.federated.algorithms.distances import squared_distances
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedaws import fedaws
from fedfr_jax.federated.algorithms.feddyn import feddyn
from fedfr_jax.federated.algorithms.ifca import hypcluster
from fedfr_jax.federated.algorithms.mime import mime
from fedfr_jax.federated.algorithms.mimelite import mimelite
from fedfr_jax.federated.algorithms.perfedavg import perfedavg
from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.robust import robust
from fedfr_jax.federated.algorithms.selection import (
    chosen_one_by_one,
    krum_scores,
)
from fedfr_jax.federated.algorithms.weiszfeld import weiszfeld
from fedfr_jax.federated.frozen import frozen
from fedfr_jax.federated.local import local_training, sgd
from fedfr_jax.losses.spreadout import class_hinge, spread, spreadout_sum
from fedfr_jax.types import Local
from tests.federated.toys import (
    LOCAL,
    close,
    flat,
    loss_fn,
    play_golden,
    replay,
    unflat,
)

TWO = {"rounds": 2}


def check_servers(end, expected):
    for server, want in zip(end.servers, expected, strict=True):
        close(flat(server.variables), want)


def check_feddyn(arrays):
    algorithm = feddyn(LOCAL, num_clients=3, strength=0.1)
    both = [(0, 1, 2), (0, 2)]
    end = play_golden(arrays, algorithm, cohorts=both)
    check_servers(end, arrays["feddyn_paper_w"])
    for server, want in zip(end.servers, arrays["feddyn_paper_h"], strict=True):
        close(-0.1 * flat(server.drift), want)
    close(-0.1 * flat(end.rows), arrays["feddyn_paper_grad"][1])


def check_feddyn_code(arrays):
    mean = float(arrays["n"].mean())
    algorithm = feddyn(LOCAL, num_clients=3, strength=0.1, mean_examples=mean)
    both = [(0, 1, 2), (0, 2)]
    end = play_golden(arrays, algorithm, cohorts=both)
    check_servers(end, arrays["feddyn_official_cloud"])
    close(flat(end.rows), arrays["feddyn_official_lambda"])


def check_mime(arrays, make=mime):
    end = play_golden(arrays, make(LOCAL), **TWO)
    name = make.__name__
    check_servers(end, arrays[f"{name}_w"])
    for server, want in zip(end.servers, arrays[f"{name}_m"], strict=True):
        close(flat(server.momentum), want)


def every_other(algorithm, count):
    """Each client's batch i holds its rows i::count only; all rows are one batch."""

    def client_update(key, server, row, client):
        whole_batch = client.batch

        def batch(step):
            whole = whole_batch(step)
            is_in = whole.position % count == step % count
            return whole._replace(is_valid=whole.is_valid & is_in)

        steps = count * client.num_steps
        client = client._replace(batch=batch, num_steps=steps)
        return algorithm.client_update(key, server, row, client)

    return algorithm._replace(client_update=client_update)


def check_perfedavg(arrays, order="fo", count=2):
    local = LOCAL._replace(learning_rate=float(arrays["perfed_beta"]))
    inner = float(arrays["perfed_alpha"])
    algorithm = perfedavg(local, inner_rate=inner, order=order)
    end = play_golden(arrays, every_other(algorithm, count), **TWO)
    check_servers(end, arrays[f"perfed_{order}_w"])
    adapted = Local(loss_fn, sgd(), inner)  # what a client deploys: a step of its own
    own = adaptation_step(arrays, adapted, end.servers[1].variables)
    close(own, arrays[f"perfed_{order}_personal"])


def adaptation_step(arrays, local, variables):
    """Every client's network after one full-batch step, [3, 18]."""
    train = local_training(local)

    def client_update(key, server, row, client):
        once = client._replace(num_steps=jnp.minimum(client.num_steps, 1))
        output = base.client_update(key, server, row, once)
        end, _ = train(key, server.variables, once)
        return output._replace(personal=end)

    base = fedavg(local)
    algorithm = base._replace(
        client_update=client_update,
        init_personal=lambda key, server: collections.merged(server.variables),
    )
    end = play_golden(arrays, algorithm, variables=variables)
    return flat(end.rows)


def check_hypcluster(arrays):
    start = unflat(arrays["cluster_centers"])
    algorithm = hypcluster(LOCAL)._replace(init=lambda models: models)
    end = play_golden(arrays, algorithm, variables=start, **TWO)
    np.testing.assert_array_equal(end.rows, arrays["hyp_assign"][1])
    for server, want in zip(end.servers, arrays["hyp_centers"], strict=True):
        close(flat(server), want)


def check_afl(arrays):
    thirds = lambda batch: (batch.position % 3 == 0).astype(jnp.int32)
    algorithm = afl(LOCAL, num_classes=2, domain_rate=0.1, domain_of=thirds)
    end = play_golden(arrays, algorithm, **TWO)
    check_servers(end, arrays["agn_w"])
    for server, share, counts in zip(
        end.servers, arrays["agn_domain_weights"], arrays["agn_window"], strict=True
    ):
        close(server.share, share)
        close(server.counts[0], counts)


def head_and_base(variables, batch, key):
    """Mean cross-entropy of tanh(x W + b) and a linear head."""
    base, head = variables["params"]["base"], variables["params"]["head"]
    images = jnp.tanh(batch.images @ base["W"] + base["b"][None])
    return loss_fn(
        {**variables, "params": head}, batch._replace(inputs={"image": images}), key
    )


def check_fedbabu(arrays):
    """The head stays with the client and does not move; then all is fine-tuned."""
    weights = {
        "base": {"W": arrays["babu_base_W0"], "b": arrays["babu_base_b0"]},
        "head": {"W": arrays["babu_head_W"], "b": arrays["babu_head_b"]},
    }
    start = {"params": weights, "batch_stats": {}}
    local = LOCAL._replace(loss=head_and_base)
    algorithm = personal(fedavg(frozen(local, "params/head")), "params/head")
    end = play_golden(arrays, algorithm, variables=start, **TWO)
    for i, server in enumerate(end.servers):
        base = server.inner.variables["params"]["base"]
        close(base["W"], arrays["babu_base_W"][i])
        close(base["b"], arrays["babu_base_b"][i])
    heads = end.rows.leaves["params"]["head"]
    np.testing.assert_array_equal(heads["W"], [arrays["babu_head_W"]] * 3)
    params = {"base": base, "head": weights["head"]}
    tuned = play_golden(
        {**arrays, "tau": [2, 2, 2]},
        personal(fedavg(local), "."),
        variables={**start, "params": params},
    ).rows.leaves["params"]
    for part, name in ((p, n) for p in ("base", "head") for n in "Wb"):
        close(tuned[part][name], arrays[f"babu_finetuned_{part}_{name}"])


CHECKS = {
    "fedbabu": check_fedbabu,
    "feddyn": check_feddyn,
    "feddyn_code": check_feddyn_code,
    "mime": check_mime,
    "mimelite": partial(check_mime, make=mimelite),
    "perfedavg": check_perfedavg,
    "perfedavg_hf": partial(check_perfedavg, order="hf", count=3),
    "hypcluster": check_hypcluster,
    "afl": check_afl,
}


@pytest.fixture
def arrays(golden):
    return {**golden("fl_rounds"), **golden("fl_more")}


@pytest.mark.parametrize("name", CHECKS)
def test_two_rounds_equal_the_golden_ones(arrays, name):
    with jax.enable_x64(True):
        CHECKS[name](arrays)


def test_defaults_are_those_of_the_goldens(arrays):
    default = lambda factory, key: inspect.signature(factory).parameters[key].default
    expected = {
        (afl, "domain_rate"): "agn_domain_lr",
        (feddyn, "strength"): "feddyn_alpha",
        (mime, "server_momentum"): "mime_momentum",
        (mimelite, "server_momentum"): "mime_momentum",
        (perfedavg, "difference"): "perfed_delta",
    }
    for given, name in expected.items():
        assert default(*given) == arrays[name]
    found = [default(fedaws, key) for key in ("margin", "strength", "rate")]
    assert found == arrays["aws_ref_nu_lam_lr"].tolist()
    for name in ("weigh", "server_rate"):
        assert default(mime, name) == default(mimelite, name)


# --- Aggregation of given changes, that clients "train"


def play_changes(algorithm_of, changes, rounds=1):
    """Rounds of clients that move by `changes` [K, 18] from wherever they are.

    The k-th of them has k + 1 examples.
    """
    number, given = len(changes), jnp.asarray(changes)

    def train(key, variables, client):
        del key
        move = unflat_row(given[client.id])
        end = jax.tree.map(jnp.add, variables["params"], move)
        zero = jnp.zeros(())
        return {**variables, "params": end}, {"loss": zero, "steps": zero + 1}

    sizes = range(1, number + 1)
    examples = [[np.zeros((n, 5)) for n in sizes], [np.zeros(n, int) for n in sizes]]
    start = unflat(np.zeros(18))
    algorithm = algorithm_of(train)
    return replay(algorithm, examples, start, where=(2, 2), rounds=rounds)


def unflat_row(w):
    return {"W": w[:15].reshape(5, 3), "b": w[15:]}


ROBUST = {
    "median": ({"name": "median"}, 9),
    "median_first8": ({"name": "median"}, 8),
    "trimmed_02": ({"name": "trimmed_mean", "fraction": 0.2}, 9),
    "trimmed_025": ({"name": "trimmed_mean", "fraction": 0.25}, 9),
    "krum": ({"name": "krum", "faulty": 2}, 9),
    "multikrum_m4": ({"name": "krum", "faulty": 2, "chosen": 4}, 9),
    "bulyan_f1": ({"name": "bulyan", "faulty": 1}, 9),
    "bulyan_f2_11": ({"name": "bulyan", "faulty": 2}, 11),
    "geomed_50": ({"name": "geometric_median", "iterations": 50}, 9),
    "geomed_weighted_50": (
        {"name": "geometric_median", "iterations": 50, "weigh": "examples"},
        9,
    ),
    # Its rule for an early stop does not come into play here.
    "rfa_official_default": (
        {"name": "geometric_median", "iterations": 4, "smoothing": 1e-5},
        9,
    ),
}


@pytest.mark.parametrize("name", ROBUST)
def test_robust_aggregates_are_the_official_ones(arrays, name):
    count = ROBUST[name][1]
    changes = np.concatenate([arrays["rob_u"], arrays["rob_u11_extra"]])[:count]
    with jax.enable_x64(True):
        end = play_changes(partial(robust, combine=rule(name)), changes)
        close(flat(end.servers[0].variables), arrays[f"rob_{name}"])
    close(arrays["rob_geomed_weights"], np.arange(1, 10) / 45)  # those of examples
    assert arrays["rob_rfa_official_default_iters"] == 4


def unflat_rows(w):
    return {"W": w[:, :15].reshape(-1, 5, 3), "b": w[:, 15:]}


def rule(name):
    """The compiled combine of a line of ROBUST."""
    settings = dict(ROBUST[name][0])
    return jax.jit(COMBINES[settings.pop("name")](**settings))


@pytest.mark.parametrize("name", sorted(ROBUST.keys() - {"median_first8"}))
def test_a_rule_of_changes_with_one_that_is_not_finite_is_that_of_the_others(
    arrays, name
):
    changes = np.concatenate([arrays["rob_u"], arrays["rob_u11_extra"]])
    bad = np.insert(changes, 4, 0, axis=0)
    counts, combine = np.arange(1, 12), rule(name)
    with jax.enable_x64(True):
        others = combine(unflat_rows(changes), counts)
        for number in (np.nan, np.inf, -np.inf):
            bad[4, 17] = number  # a single coordinate
            found = combine(unflat_rows(bad), np.insert(counts, 4, 5))
            jax.tree.map(close, found, others)


DROPPING = {
    "median": partial(robust, combine=COMBINES["median"]()),
    "geometric_median": partial(robust, combine=COMBINES["geometric_median"]()),
    "krum": partial(robust, combine=COMBINES["krum"](faulty=2)),
    "norm_clipping": norm_clipping,
    "centred_clipping": centred_clipping,
    "weiszfeld": weiszfeld,
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_client_whose_update_is_not_finite_is_dropped_and_named(arrays, name):
    changes = np.asarray(arrays["rob_u"])
    bad = np.append(changes, [np.full(18, np.nan)], axis=0)
    with jax.enable_x64(True):
        expected = play_changes(DROPPING[name], changes, rounds=2)
        found = play_changes(DROPPING[name], bad, rounds=2)
        for server, want in zip(found.servers, expected.servers, strict=True):
            jax.tree.map(close, server, want)
        assert found.metrics["dropped"].tolist() == 9 * [0] + [1]
        with pytest.raises(FloatingPointError, match="round 1 .* from all 9 clients"):
            play_changes(DROPPING[name], np.full_like(changes, np.inf))


@pytest.mark.parametrize("of", ["X", "X2"])
@pytest.mark.parametrize("faulty", [1, 3])
def test_krum_is_the_papers_of_k_minus_f_minus_2_neighbours(golden, of, faulty):
    """Not of one neighbour more as in byzfl, which chooses other clients here."""
    arrays = golden("robust_byzfl")
    rows = arrays[f"{of}_multikrum_paper_f{faulty}_rows_own"]
    with jax.enable_x64(True):
        given = arrays[of], np.ones(11)
        one = jax.jit(COMBINES["krum"](faulty=faulty))(*given)
        mean = jax.jit(COMBINES["krum"](faulty=faulty, chosen=len(rows)))(*given)
    close(one, arrays[of][arrays[f"{of}_krum_paper_f{faulty}_index_own"]])
    close(mean, arrays[f"{of}_multikrum_paper_f{faulty}_own"])


def test_krum_scores_and_bulyans_choices_are_the_official_ones(arrays):
    with jax.enable_x64(True):
        distances = jax.jit(squared_distances)(unflat_rows(arrays["rob_u"]))
        scores = jax.jit(partial(krum_scores, count=9 - 2 - 2))(distances)
        close(scores, arrays["rob_krum_scores"])
        chosen = jax.jit(lambda x: chosen_one_by_one(x, 7, 1))(distances)
    np.testing.assert_array_equal(chosen, arrays["rob_bulyan_f1_selected"])


def test_norm_clipping_is_flowers(arrays):
    with jax.enable_x64(True):
        end = play_changes(partial(norm_clipping, bound=1.0), arrays["rob_u"])
        close(flat(end.servers[0].variables), arrays["rob_norm_clip_1_mean"])


def test_centred_clipping_goes_on_from_the_center_of_the_round_before(arrays):
    """A call of the official code is three iterations, three rounds of ours."""
    with jax.enable_x64(True):
        make = partial(centred_clipping, bound=1.0)
        servers = play_changes(make, arrays["rob_u"], rounds=6).servers
        close(flat(servers[2].center), arrays["rob_centered_clip_call1"])
        close(flat(servers[5].center), arrays["rob_centered_clip_call2"])
        steps = sum(flat(server.center) for server in servers)
        close(flat(servers[5].inner.variables), steps)


@pytest.mark.parametrize("weigh", ["equally", "examples"])
def test_rounds_of_weiszfeld_are_iterations_from_the_received_model(arrays, weigh):
    """Of clients whose changes stay the same, two of nine far away."""
    changes = np.asarray(arrays["rob_u"]).copy()
    changes[:2] += 50
    counts = np.arange(1, 10) if weigh == "examples" else np.ones(9)
    centers = [np.zeros(18)]
    for _ in range(60):
        distances = np.linalg.norm(changes - centers[-1], axis=1)
        centers.append(np.average(changes, axis=0, weights=counts / distances))
    combine = COMBINES["geometric_median"](iterations=200, weigh=weigh)
    tree = {"params": changes}
    with jax.enable_x64(True):
        median = jax.jit(combine)(tree, np.arange(1, 10))["params"]
        make = partial(weiszfeld, weigh=weigh)
        servers = play_changes(make, changes, rounds=60).servers
        for server, expected in zip(servers, centers[1:], strict=True):
            close(flat(server.center), expected)
        steps = sum(flat(server.center) for server in servers)
        close(flat(servers[-1].inner.variables), steps)
    np.testing.assert_allclose(centers[-1], median, rtol=1e-5, atol=1e-5)
    assert np.abs(changes.mean(0) - centers[-1]).min() > 5  # where the mean is


def test_a_change_in_the_centre_weighs_no_more_than_the_smoothing_lets_it():
    changes = np.stack([np.zeros(18), np.ones(18)])
    make = partial(weiszfeld, smoothing=0.5)
    with jax.enable_x64(True):
        (server,) = play_changes(make, changes).servers
    shares = np.array([1 / 0.5, 1 / np.sqrt(18)])
    close(flat(server.center), np.full(18, shares[1] / shares.sum()))


@pytest.mark.parametrize(
    "combine, least",
    [
        (COMBINES["krum"](faulty=4), 11),
        (COMBINES["krum"](faulty=1, chosen=10), 10),
        (COMBINES["bulyan"](faulty=2), 11),
    ],
)
def test_a_cohort_too_small_for_its_faulty_clients_is_refused(arrays, combine, least):
    make = lambda train: robust(train, combine=combine)
    with pytest.raises(ValueError, match=f"at least {least} .* got 9"):
        play_changes(make, arrays["rob_u"])
    with pytest.raises(ValueError, match=f"at least {least} .* got 9"):
        make(LOCAL).check_cohort(9)
    make(LOCAL).check_cohort(least)


def test_a_combine_may_look_at_the_axes_of_a_kernel():
    def combine(changes, examples):
        del examples
        return jax.tree.map(lambda x: jnp.flip(x, axis=1).mean(axis=0), changes)

    robust(LOCAL, combine=combine).check_cohort(5)


# --- FedAwS


def aws_server(arrays, **settings):
    """The server after a round in which no client moves, whose classes are W [C, D]."""

    def train(key, variables, client):
        del key, client
        return variables, {"loss": jnp.zeros(()), "steps": jnp.ones(())}

    algorithm = fedaws(
        train, spreadout=spreadout_sum, classes="params/fc/kernel", **settings
    )
    kernel = arrays["aws_W"].T
    variables = {"params": {"fc": {"kernel": kernel}}, "batch_stats": {}}
    examples = [[np.zeros((1, 5))], [np.zeros(1, np.int32)]]
    end = replay(algorithm, examples, variables)
    return end.servers[0].variables["params"]["fc"]["kernel"].T


def test_the_server_of_fedaws_spreads_the_class_rows(arrays):
    margin, strength, rate = arrays["aws_ref_nu_lam_lr"].tolist()
    with jax.enable_x64(True):
        rows = jnp.asarray(arrays["aws_W"])
        loss = jax.jit(jax.value_and_grad(partial(spreadout_sum, margin=1 - margin)))
        value, gradient = loss(rows)
        close(value, arrays["aws_ref_reg"])
        close(gradient, arrays["aws_ref_grad"])
        moved = aws_server(arrays, margin=margin, strength=strength, rate=rate)
        close(moved, arrays["aws_ref_W_1"])


def test_flukes_spreading_is_ours_in_its_units(arrays):
    """Its distance is (1 - cos) / 2 and its mean over C^2, ours over C (C - 1)."""
    rate = 0.1 * 5 / 6 / 4
    with jax.enable_x64(True):
        rows = jnp.asarray(arrays["aws_W"])
        for steps in (1, 5, 100):
            options = {"learning_rate": rate, "weight_decay": 0.0, "margin": 0.0}
            moved, losses = jax.jit(partial(spread, steps=steps, **options))(rows)
            close(moved, arrays[f"aws_fluke_W_{steps}"])
        history = arrays["aws_fluke_loss_history"]
        close(losses * 5 / 6 / 4 + 0.25 / 6, history)


def test_a_client_of_fedaws_pulls_its_features_to_its_class(arrays):
    with jax.enable_x64(True):
        z = arrays["aws_pos_z"]
        own = np.broadcast_to(arrays["aws_W"][int(arrays["aws_pos_class"])], z.shape)
        loss = jax.jit(jax.value_and_grad(lambda z: class_hinge(z, own).mean()))
        value, gradient = loss(z)
        close(value, arrays["aws_pos_loss"])
        close(gradient, arrays["aws_pos_grad_z"])
