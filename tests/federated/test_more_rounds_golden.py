"""Two golden rounds of further methods, replayed through the real engine."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.afl import afl
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedaws import fedaws
from fedfr_jax.federated.algorithms.feddyn import feddyn
from fedfr_jax.federated.algorithms.ifca import hypcluster
from fedfr_jax.federated.algorithms.mime import mime, mimelite
from fedfr_jax.federated.algorithms.perfedavg import perfedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.local import build_local_training, freeze_leaves, sgd
from fedfr_jax.losses.spreadout import class_hinge, spread, spreadout_sum
from fedfr_jax.types import LocalTraining
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
    algorithm = feddyn(LOCAL, num_clients=3, alpha=0.1)
    both = [(0, 1, 2), (0, 2)]
    end = play_golden(arrays, algorithm, cohorts=both)
    check_servers(end, arrays["feddyn_paper_w"])
    for server, want in zip(end.servers, arrays["feddyn_paper_h"], strict=True):
        close(-0.1 * flat(server.drift), want)
    close(-0.1 * flat(end.rows), arrays["feddyn_paper_grad"][1])


def check_feddyn_code(arrays):
    mean = float(arrays["n"].mean())
    algorithm = feddyn(LOCAL, num_clients=3, alpha=0.1, mean_examples=mean)
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
    algorithm = perfedavg(local, inner_learning_rate=inner, order=order)
    end = play_golden(arrays, every_other(algorithm, count), **TWO)
    check_servers(end, arrays[f"perfed_{order}_w"])
    adapted = LocalTraining(
        loss_fn, sgd(), inner
    )  # what a client deploys: a step of its own
    own = adaptation_step(arrays, adapted, end.servers[1].variables)
    close(own, arrays[f"perfed_{order}_personal"])


def adaptation_step(arrays, local, variables):
    """Every client's network after one full-batch step, [3, 18]."""
    train = build_local_training(local)

    def client_update(key, server, row, client):
        once = client._replace(num_steps=jnp.minimum(client.num_steps, 1))
        output = base.client_update(key, server, row, once)
        end, _ = train(key, server.variables, once)
        return output._replace(personal=end)

    base = fedavg(local)
    algorithm = base._replace(
        client_update=client_update,
        init_personal=lambda key, server: variable_split.merge_personal_variables(
            server.variables
        ),
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
    algorithm = afl(LOCAL, num_classes=2, domain_learning_rate=0.1, domain_of=thirds)
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
    algorithm = with_personal_layers(
        fedavg(freeze_leaves(local, "params/head")), "params/head"
    )
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
        with_personal_layers(fedavg(local), "."),
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
        (afl, "domain_learning_rate"): "agn_domain_lr",
        (feddyn, "alpha"): "feddyn_alpha",
        (mime, "server_momentum"): "mime_momentum",
        (mimelite, "server_momentum"): "mime_momentum",
        (perfedavg, "hf_delta"): "perfed_delta",
    }
    for given, name in expected.items():
        assert default(*given) == arrays[name]
    found = [default(fedaws, key) for key in ("margin", "lam", "server_learning_rate")]
    assert found == arrays["aws_ref_nu_lam_lr"].tolist()
    for name in ("weighting", "server_learning_rate"):
        assert default(mime, name) == default(mimelite, name)


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
    margin, lam, rate = arrays["aws_ref_nu_lam_lr"].tolist()
    with jax.enable_x64(True):
        rows = jnp.asarray(arrays["aws_W"])
        loss = jax.jit(jax.value_and_grad(partial(spreadout_sum, margin=1 - margin)))
        value, gradient = loss(rows)
        close(value, arrays["aws_ref_reg"])
        close(gradient, arrays["aws_ref_grad"])
        moved = aws_server(arrays, margin=margin, lam=lam, server_learning_rate=rate)
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
