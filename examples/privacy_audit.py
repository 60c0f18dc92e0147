"""Privacy audit: a lower bound on epsilon, from clients inserted as canaries.

    python examples/privacy_audit.py

Andrew et al. 2024, arXiv:2302.03098: a canary sends a direction of its own instead of
an update. Half of the canaries are held out and send nothing. In thousands of
dimensions the directions are almost orthogonal, so that how far the model has moved
along one of them shows whether its client took part; how well it does so bounds epsilon
from below. A bound above the accountant's epsilon would be a fault of the mechanism.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import auditing

import fedfr_jax as ff

CLIENTS, CANARIES, SIZE = 8, 160, 4_000
DELTA, CONFIDENCE = 1e-3, 0.95


def direction(number, like):
    """The direction of a canary, with a norm above any clip norm."""
    drawn = optax.tree.random_like(jax.random.key(number), like)
    return optax.tree.scale(1e6 / optax.tree.norm(drawn), drawn)


def with_canaries(algorithm: ff.Algorithm) -> ff.Algorithm:
    """Canaries are the clients from CLIENTS on; those with an odd number are held out.

    `ff.private` goes around it.
    """

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        number = client.id - CLIENTS
        sent = direction(number, output.update)
        sent = jax.tree.map(lambda x: jnp.where(number % 2 == 0, x, 0), sent)
        choose = lambda x, y: jnp.where(number >= 0, x, y)
        return output._replace(update=jax.tree.map(choose, sent, output.update))

    return algorithm._replace(client_update=client_update)


def train(key, variables, client):
    """A client that moves a little, and not along any canary."""
    del client
    step = 1e-3 * jax.random.normal(key, (SIZE,))
    params = {"w": variables["params"]["w"] + step}
    metrics = {"loss": jnp.zeros(()), "steps": jnp.ones(())}
    return {**variables, "params": params}, metrics


def audit(noise_multiplier: float) -> tuple[float, float]:
    """(proved lower bound, epsilon of the accountant) of one round of all clients."""
    total = CLIENTS + CANARIES
    privacy = ff.Privacy(0.5, noise_multiplier, cohort_size=total, delta=DELTA)
    algorithm = ff.private(with_canaries(ff.fedavg(train)), privacy)
    inputs, clients = np.zeros((total, 1), np.float32), np.arange(total)
    data = ff.FederatedDataset.from_client_ids(inputs, np.zeros(total, int), clients)
    start = {"w": jnp.zeros(SIZE)}
    run = ff.init(algorithm, data, start, batch_size=1, clients_per_device=42)
    run, metrics = ff.run_round(run)
    moved = {"params": algorithm.global_model(run.server)["params"], "batch_stats": {}}

    @jax.jit
    def score(number):
        return optax.tree.vdot(direction(number, moved), moved)

    scores = np.asarray(jax.lax.map(score, jnp.arange(CANARIES)))
    # Clopper-Pearson intervals of the best threshold, with Bonferroni's correction: n
    # canaries of each kind prove at most about log(n / 4).
    auditor = auditing.CanaryScoreAuditor(scores[::2], scores[1::2])
    proved = auditor.epsilon_clopper_pearson(1 - CONFIDENCE, DELTA)
    return float(proved), float(metrics["epsilon"])


if __name__ == "__main__":
    for noise in (0.0, 0.6):
        proved, epsilon = audit(noise)
        print(
            f"noise {noise}: at least {proved:.2f} is proved, epsilon is {epsilon:.2f}"
        )
