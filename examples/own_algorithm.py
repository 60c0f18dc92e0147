"""Your own algorithm: FedAvg in which small updates count more.

    python examples/own_algorithm.py

An algorithm is pure functions of one client and of the server. The engine adds the
cohort, the devices, checkpoints and the sum over clients.
"""

import jax.numpy as jnp
import numpy as np
import optax

import fedfr_jax as ff


def inverse_norm(training, *, power=1.0):
    """FedAvg that weighs a client by 1 / |update|^power; power=0 is the plain mean."""
    train = ff.build_local_training(training)

    def client_update(key, server, personal, client):
        end, metrics = train(key, server, client)
        change = optax.tree.sub(end["params"], server["params"])
        weight = 1 / (optax.tree.norm(change) + 1e-6) ** power
        metrics = {**metrics, "weight": weight}
        return ff.client_output(server, end, weight, personal, metrics)

    return ff.Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=ff.aggregation.weighted_mean(),
        server_update=lambda server, result: optax.tree.add(server, result.aggregate),
        personalize=lambda server, personal: server,
    )


def clients_with_noise(num_clients=50, examples=20, dim=16, noisy=0.3):
    """Linear data; a share of the clients has random labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_clients * examples, dim)).astype(np.float32)
    y = (x @ rng.normal(size=dim) > 0).astype(np.int32)
    client_ids = np.repeat(np.arange(num_clients), examples)
    is_noisy = client_ids < noisy * num_clients
    y[is_noisy] = rng.integers(0, 2, is_noisy.sum())
    return x, y, client_ids


def logits(variables, x):
    """A linear classifier, [B, D] -> [B, 2]."""
    return x @ variables["params"]["w"]


def loss(variables, batch, key):
    """Mean cross-entropy of a batch's valid examples."""
    values = logits(variables, batch.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(values, batch.labels)
    return ff.masked_mean(losses, batch.is_valid)


def main(rounds=20):
    """Train with FedAvg and with our rule; returns {name: accuracy on clean data}."""
    train = ff.FederatedDataset.from_client_ids(*clients_with_noise())
    clean = ff.FederatedDataset.from_client_ids(*clients_with_noise(noisy=0))
    training = ff.LocalTraining(loss, optax.sgd, learning_rate=0.1)
    found = {}
    for name, algorithm in {
        "fedavg": ff.fedavg(training),
        "inverse_norm": inverse_norm(training),
    }.items():
        run = ff.init(algorithm, train, {"w": jnp.zeros((16, 2))}, batch_size=5)
        for _ in range(rounds):
            run, _ = ff.run_round(run)
        found[name] = ff.evaluate(run, logits, clean)["accuracy"]
        print(f"{name}: {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
