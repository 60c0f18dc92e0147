"""Every method's golden rounds, replayed through the real engine, and its limits."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.robust import trimmed_mean
from fedfr_jax.federated.algorithms.clusters import build_clustered
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.types import LocalTraining, RoundResult
from tests.federated.toys import (
    LOCAL,
    RATE,
    close,
    flat,
    loss_fn,
    norm_loss,
    norm_variables,
    play_golden,
    replay,
    unflat,
)


class Case(NamedTuple):
    """Rounds of the golden files."""

    build: Callable  # arrays -> algorithm
    server: str  # array of the flat variables after the only round, or after each
    options: Callable = lambda arrays: {}  # of the rounds
    also: Callable = lambda end, arrays: None  # checks further arrays


def of_models(algorithm):
    """A clustered algorithm that starts from several given models [J, ...]."""
    return algorithm._replace(init=lambda models: models)


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


def perfedavg_of(arrays, order, count):
    local = LOCAL._replace(learning_rate=float(arrays["perfed_beta"]))
    rate = float(arrays["perfed_alpha"])
    return every_other(
        ff.perfedavg(local, inner_learning_rate=rate, order=order), count
    )


def pfedme_of(decay):
    local = LocalTraining(loss_fn, ff.sgd(weight_decay=decay), 0.005)
    return ff.pfedme(local, personal_learning_rate=0.05)


def afl_by_thirds(arrays):
    thirds = lambda batch: (batch.position % 3 == 0).astype(jnp.int32)
    return ff.afl(LOCAL, num_classes=2, domain_of=thirds)


def own_rows(arrays):
    """Personal models of APFL that are those of the golden file."""
    own = {"v": unflat(arrays["ditto_v0"])["params"], "alpha": np.full(3, 0.5)}
    return {"rows": {"params": own, "batch_stats": {}}}


def directions(name):
    """What clients step along besides their gradients, after each round."""

    def check(end, arrays):
        for server, want in zip(end.servers, arrays[name], strict=True):
            close(flat(server.direction), want)

    return check


def also_scaffold(end, arrays):
    close(flat(end.servers[0].variables), arrays["fairavg"])  # zero controls
    close(flat(end.servers[1].direction), arrays["scaffold_c"])
    close(flat(end.rows), arrays["scaffold_ci"])


def also_feddyn(end, arrays):
    for server, want in zip(end.servers, arrays["feddyn_paper_h"], strict=True):
        close(-0.1 * flat(server.drift), want)
    close(-0.1 * flat(end.rows), arrays["feddyn_paper_grad"][1])


def also_apfl(end, arrays):
    close(flat(end.rows["params"]["v"]), arrays["apfl_v"])
    close(end.rows["params"]["alpha"], arrays["apfl_alpha"])
    handed = jax.vmap(ff.apfl(LOCAL).personalize, (None, 0))(end.servers[0], end.rows)
    share = arrays["apfl_alpha"][:, None]
    close(flat(handed), share * arrays["apfl_v"] + (1 - share) * arrays["apfl_global"])


def also_afl(end, arrays):
    wanted = zip(arrays["agn_domain_weights"], arrays["agn_window"], strict=True)
    for server, (share, counts) in zip(end.servers, wanted, strict=True):
        close(server.share, share)
        close(server.counts[0], counts)


def rows_are(name):
    return lambda end, arrays: close(flat(end.rows), arrays[name])


MIXED = lambda arrays: {"cohorts": [(0, 1, 2), (0, 2)]}
CASES = {
    "fedavg": Case(lambda a: ff.fedavg(LOCAL), "fedavg"),
    "fairavg": Case(lambda a: ff.fedavg(LOCAL, weighting="uniform"), "fairavg"),
    "fedprox": Case(lambda a: ff.fedprox(LOCAL, mu=float(a["fedprox_mu"])), "fedprox"),
    "feddane": Case(lambda a: ff.feddane(LOCAL, mu=float(a["fedprox_mu"])), "feddane"),
    "fednova": Case(lambda a: ff.fednova(LOCAL), "fednova"),
    "fednova with momentum": Case(
        lambda a: ff.fednova(
            LocalTraining(loss_fn, ff.sgd(momentum=float(a["fednova_mom_rho"])), RATE),
            momentum=float(a["fednova_mom_rho"]),
        ),
        "fednova_mom",
    ),
    "qfedavg": Case(
        lambda a: ff.qfedavg(LOCAL, q=float(a["qfedavg_q"])),
        "qfedavg",
        also=lambda end, a: close(end.metrics["initial_loss"], a["loss0"], atol=2e-10),
    ),
    "scaffold": Case(
        lambda a: ff.scaffold(LOCAL, num_clients=3), "scaffold", also=also_scaffold
    ),
    "mime": Case(lambda a: ff.mime(LOCAL), "mime_w", also=directions("mime_m")),
    "mimelite": Case(
        lambda a: ff.mimelite(LOCAL), "mimelite_w", also=directions("mimelite_m")
    ),
    "feddyn": Case(
        lambda a: ff.feddyn(LOCAL, num_clients=3), "feddyn_paper_w", MIXED, also_feddyn
    ),
    "feddyn, the authors' code": Case(
        lambda a: ff.feddyn(LOCAL, num_clients=3, mean_examples=float(a["n"].mean())),
        "feddyn_official_cloud",
        MIXED,
        rows_are("feddyn_official_lambda"),
    ),
    "ditto": Case(
        lambda a: ff.ditto(LOCAL, lam=float(a["ditto_lambda"])),
        "fedavg",
        lambda a: {"rows": unflat(a["ditto_v0"])},
        rows_are("ditto_v"),
    ),
    "apfl": Case(lambda a: ff.apfl(LOCAL), "apfl_global", own_rows, also_apfl),
    "pfedme": Case(
        lambda a: pfedme_of(0.0),
        "pfedme_paper_global",
        also=rows_are("pfedme_paper_theta"),
    ),
    "pfedme, the authors' code": Case(
        lambda a: pfedme_of(1e-3),
        "pfedme_code_global",
        also=rows_are("pfedme_code_theta"),
    ),
    "perfedavg": Case(lambda a: perfedavg_of(a, "fo", 2), "perfed_fo_w"),
    "perfedavg with the Hessian": Case(
        lambda a: perfedavg_of(a, "hf", 3), "perfed_hf_w"
    ),
    "afl": Case(afl_by_thirds, "agn_w", also=also_afl),
    # Limits.
    "fedprox with mu 0": Case(lambda a: ff.fedprox(LOCAL, mu=0.0), "fedavg"),
    "qfedavg with q 0": Case(lambda a: ff.qfedavg(LOCAL, q=0.0), "fairavg"),
    "fedaws without a step": Case(
        lambda a: ff.fedaws(LOCAL, spreadout=spreadout_sum, classes="W$", lam=0.0),
        "fedavg",
    ),
    "a trimmed mean that trims nothing": Case(
        lambda a: ff.with_aggregation(
            ff.fedavg(LOCAL), trimmed_mean(trim_fraction=0.3)
        ),
        "fairavg",
    ),
}


@pytest.fixture
def arrays(golden):
    return {**golden("fl_rounds"), **golden("fl_more")}


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_golden_ones(arrays, name):
    case = CASES[name]
    wanted = np.atleast_2d(arrays[case.server])
    options = {"rounds": len(wanted), **case.options(arrays)}
    with jax.enable_x64(True):
        end = play_golden(arrays, case.build(arrays), **options)
        for server, want in zip(end.servers, wanted, strict=True):
            close(flat(server.variables), want)
        case.also(end, arrays)


def numpy_sgd(arrays, k, w):
    """Client k's steps from flat `w`, without JAX."""
    x, y = arrays[f"x{k}"], arrays[f"y{k}"]
    for _ in range(arrays["tau"][k]):
        logits = x @ w[:15].reshape(5, 3) + w[15:]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        gradient = np.concatenate([(x.T @ p).ravel(), p.sum(0)]) / len(y)
        w = w - 0.1 * gradient
    return w


def test_local_training_alone_keeps_everything(arrays):
    with jax.enable_x64(True):
        end = play_golden(arrays, ff.with_personal_layers(ff.fedavg(LOCAL), "."))
    close(flat(end.rows.leaves), arrays["local_sgd"])
    close(flat(end.servers[0].first), arrays["w0"])
    assert not jax.tree.leaves(end.servers[0].inner)


def test_clients_of_ifca_and_hypcluster_train_the_model_of_least_loss(arrays):
    centers, groups = arrays["cluster_centers"], arrays["ifca_assign"]
    trained = np.stack([numpy_sgd(arrays, k, centers[j]) for k, j in enumerate(groups)])
    with jax.enable_x64(True):
        options = {"variables": unflat(centers)}
        end = play_golden(arrays, of_models(ff.ifca(LOCAL)), **options)
        np.testing.assert_array_equal(end.rows, groups)
        means = [trained[groups == j].mean(0) for j in range(2)]
        close(flat(end.servers[0]), means)
        end = play_golden(arrays, of_models(ff.hypcluster(LOCAL)), rounds=2, **options)
        np.testing.assert_array_equal(end.rows, arrays["hyp_assign"][1])
        for server, want in zip(end.servers, arrays["hyp_centers"], strict=True):
            close(flat(server), want)
        one = of_models(ff.ifca(LOCAL, num_clusters=1))
        end = play_golden(arrays, one, variables=unflat(arrays["w0"][None]))
        close(flat(end.servers[0])[0], arrays["fairavg"])


def test_clients_of_fesem_join_the_nearest_model(arrays):
    variables = unflat(np.concatenate([arrays["cluster_centers"], arrays["w0"][None]]))
    variables["params"]["W"][2] += 9  # a model that nobody trains or joins
    before = np.array([1, 1, 0], np.int32)
    algorithm = of_models(ff.fesem(LOCAL, num_clusters=3))
    with jax.enable_x64(True):
        end = play_golden(arrays, algorithm, variables=variables, rows=before)
    models = flat(variables)
    trained = np.stack([numpy_sgd(arrays, k, models[j]) for k, j in enumerate(before)])
    distance = ((trained[:, None] - models[None]) ** 2).sum(-1)
    groups = distance.argmin(1)
    np.testing.assert_array_equal(end.rows, groups)
    for j in range(3):
        is_in = groups == j
        expected = trained[is_in].mean(0) if is_in.any() else models[j]
        close(flat(end.servers[0])[j], expected)


def test_models_of_groups_start_apart_by_their_spread_and_alike_in_statistics():
    kernel = np.random.default_rng(1).normal(scale=3, size=(40, 50))
    variables = {
        "params": {"kernel": jnp.float32(kernel), "bias": jnp.zeros(4)},
        "batch_stats": {"mean": jnp.arange(3.0)},
    }
    models = build_clustered(None, 3, 0.1).init(variables)
    apart = np.asarray(models["params"]["kernel"]) - np.float32(kernel)
    np.testing.assert_allclose(apart.std(axis=(1, 2)), 0.1 * kernel.std(), rtol=0.05)
    between = np.corrcoef(apart.reshape(3, -1))
    assert np.abs(between - np.eye(3)).max() < 0.1  # each in a direction of its own
    np.testing.assert_array_equal(models["params"]["bias"], np.zeros((3, 4)))
    np.testing.assert_array_equal(models["batch_stats"]["mean"], [[0, 1, 2]] * 3)


def test_apfls_share_begins_where_it_is_told_and_stays_a_share(arrays):
    algorithm = ff.apfl(LOCAL._replace(learning_rate=5.0), alpha=0.9)
    own = algorithm.init_personal(None, algorithm.init(unflat(arrays["w0"])))
    np.testing.assert_allclose(own["params"]["alpha"], 0.9)
    with jax.enable_x64(True):
        end = play_golden(arrays, algorithm, **own_rows(arrays)).rows
    share = end["params"]["alpha"]
    assert ((share >= 0) & (share <= 1)).all()
    assert (share == 0).any() or (share == 1).any()  # where a step went beyond


def test_a_client_deploys_per_fedavg_after_a_step_of_its_own(arrays):
    train = ff.build_local_training(
        LOCAL._replace(learning_rate=arrays["perfed_alpha"])
    )
    base = ff.fedavg(LOCAL)

    def client_update(key, server, row, client):
        once = client._replace(num_steps=jnp.minimum(client.num_steps, 1))
        output = base.client_update(key, server, row, once)
        return output._replace(personal=train(key, server.variables, once)[0])

    algorithm = base._replace(
        client_update=client_update, init_personal=variable_split.init_from_received
    )
    with jax.enable_x64(True):
        variables = unflat(arrays["perfed_fo_w"][1])
        end = play_golden(arrays, algorithm, variables=variables)
    close(flat(end.rows), arrays["perfed_fo_personal"])


def head_and_base(variables, batch, key):
    """Mean cross-entropy of tanh(x W + b) and a linear head."""
    base, head = variables["params"]["base"], variables["params"]["head"]
    images = jnp.tanh(batch.images @ base["W"] + base["b"][None])
    batch = batch._replace(inputs={"image": images})
    return loss_fn({**variables, "params": head}, batch, key)


def test_fedbabus_head_stays_and_does_not_move_then_all_is_fine_tuned(arrays):
    weights = {
        "base": {"W": arrays["babu_base_W0"], "b": arrays["babu_base_b0"]},
        "head": {"W": arrays["babu_head_W"], "b": arrays["babu_head_b"]},
    }
    start, local = (
        {"params": weights, "batch_stats": {}},
        LOCAL._replace(loss=head_and_base),
    )
    still = ff.fedavg(
        local._replace(
            optimizer=lambda rate: trees.freeze(local.optimizer(rate), "params/head")
        )
    )
    algorithm = ff.with_personal_layers(still, "params/head")
    with jax.enable_x64(True):
        end = play_golden(arrays, algorithm, variables=start, rounds=2)
        for i, server in enumerate(end.servers):
            base = server.inner.variables["params"]["base"]
            close(base["W"], arrays["babu_base_W"][i])
            close(base["b"], arrays["babu_base_b"][i])
        heads = end.rows.leaves["params"]["head"]
        np.testing.assert_array_equal(heads["W"], [arrays["babu_head_W"]] * 3)
        params = {"base": base, "head": weights["head"]}
        tuned = play_golden(
            {**arrays, "tau": [2, 2, 2]},
            ff.with_personal_layers(ff.fedavg(local), "."),
            variables={**start, "params": params},
        ).rows.leaves["params"]
    for part, name in ((p, n) for p in ("base", "head") for n in "Wb"):
        close(tuned[part][name], arrays[f"babu_finetuned_{part}_{name}"])


def test_the_server_of_fedaws_spreads_the_class_rows(arrays):
    """After a round in which no client moves, whose classes are W [C, D]."""
    margin, lam, rate = arrays["aws_ref_nu_lam_lr"].tolist()

    def train(key, variables, client):
        return variables, {"loss": jnp.zeros(()), "steps": jnp.ones(())}

    algorithm = ff.fedaws(
        train,
        spreadout=spreadout_sum,
        classes="params/fc/kernel",
        margin=margin,
        lam=lam,
        server_learning_rate=rate,
    )
    params = {"fc": {"kernel": arrays["aws_W"].T}}
    examples = [[np.zeros((1, 5))], [np.zeros(1, np.int32)]]
    with jax.enable_x64(True):
        end = replay(algorithm, examples, {"params": params, "batch_stats": {}})
    moved = end.servers[0].variables["params"]["fc"]["kernel"].T
    close(moved, arrays["aws_ref_W_1"])


def test_afls_window_has_the_counts_of_the_last_rounds():
    algorithm = ff.afl(LOCAL, num_classes=2, domain_window_size=3)
    server = algorithm.init(norm_variables())
    for number in range(4):
        counts = jnp.full(2, float(number))
        sums = {"mean": jnp.zeros(16)}, jnp.float32(1), counts, counts
        aggregate = {"params": jax.tree.map(jnp.zeros_like, server.variables["params"])}
        result = RoundResult(aggregate, (), {}, jnp.ones(3), number, sums=sums)
        server = algorithm.server_update(server, result)
    np.testing.assert_array_equal(server.counts[:, 0], [1, 2, 3])


def test_the_servers_rate_of_mime_is_for_params_alone():
    params, stats = {"w": jnp.zeros(3)}, {"mean": jnp.zeros(())}
    change = {"params": {"w": jnp.arange(3.0)}, "batch_stats": {"mean": jnp.ones(())}}
    result = RoundResult((change, {"w": jnp.ones(3)}), (), {}, jnp.ones(3), 0)
    algorithm = ff.mimelite(LOCAL, server_learning_rate=0.5)
    begun = algorithm.init({"params": params, "batch_stats": stats})
    moved = algorithm.server_update(begun, result).variables
    np.testing.assert_array_equal(moved["params"]["w"], [0, 0.5, 1])
    assert moved["batch_stats"]["mean"] == 1


def test_scaffolds_control_moves_by_the_share_of_clients_that_took_part():
    algorithm = ff.scaffold(LOCAL._replace(learning_rate=0.1), num_clients=4)
    variables = {"params": {"x": np.zeros(2, np.float32)}, "batch_stats": {}}
    drift, gain = jax.tree.map(np.zeros_like, variables), {"x": np.float32([1, 2])}
    result = RoundResult((drift, gain), (), {}, np.ones(3, np.float32), 0)
    control = algorithm.server_update(algorithm.init(variables), result).direction
    np.testing.assert_allclose(control["x"], [0.75, 1.5])


def test_qfedavg_bears_clients_without_any_loss():
    nothing = lambda variables, batch, key: (
        0 * norm_loss(variables, batch, key)[0],
        {},
    )
    algorithm = ff.qfedavg(LocalTraining(nothing, ff.sgd(), 0.1), q=0.5)
    examples = [np.ones((2, 4, 4, 1), np.float32)], [np.zeros(2, np.int32)]
    end = replay(algorithm, examples, norm_variables())
    jax.tree.map(
        np.testing.assert_array_equal, end.servers[0].variables, norm_variables()
    )


@pytest.mark.parametrize("rate", [0.0, lambda round, epoch: jnp.zeros(())])
def test_qfedavg_without_a_step_is_refused_before_training(rate):
    with pytest.raises(ValueError, match="^learning_rate must be positive .*, got 0.0"):
        ff.qfedavg(LocalTraining(loss_fn, ff.sgd(), rate), q=1.0)
