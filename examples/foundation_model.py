"""Fine-tune a pretrained network over a thousand clients, which share one copy of it.

    python examples/foundation_model.py

A small vision transformer learns the digits 0 to 4 in one place; in earnest its numbers
are those of a file that `fedfr convert` has read. Then a thousand clients with eight
noisy images each learn 5 to 9: a linear probe, LoRA, and all numbers. What each of them
would send is printed beside the accuracy. LoRA ends as a plain network, and as a folder
for PEFT. The digits come with scikit-learn.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff
from fedfr_jax.tasks.classification import cross_entropy

CLIENTS = 1000


def images(digits, rng, count, num_clients):
    """`count` noisy images of each client, drawn from these rows of the digits."""
    source = load_digits()
    rows = rng.choice(np.flatnonzero(digits), (num_clients, count)).ravel()
    x = (source.images[rows, ..., None] / 8 - 1).repeat(2, axis=1).repeat(2, axis=2)
    x = (x + 0.3 * rng.normal(size=x.shape)).astype(np.float32)
    owners = np.arange(len(x)) // count
    return ff.FederatedDataset.from_client_ids(x, source.target[rows] % 5, owners)


def trained(model, variables, data, rounds, optimizer, rate, **options):
    """A run of FedAvg after some rounds."""
    local = ff.LocalTraining(cross_entropy(model), optimizer, learning_rate=rate)
    run = ff.init(ff.fedavg(local), data, variables, **options)
    return ff.run_rounds(run, rounds)[0]


def main(rounds=15, epochs=10, num_clients=CLIENTS, folder="runs/digits_lora"):
    """Returns {what moves: accuracy on digits that nobody trained on}."""
    target, rng = load_digits().target, np.random.default_rng(0)
    is_new, is_test = target >= 5, np.arange(len(target)) % 4 == 0
    train = images(is_new & ~is_test, rng, 8, num_clients)
    test = images(is_new & is_test, rng, 2, num_clients)
    network = ff.MODELS["vision_transformer"](
        (16, 16, 1), width=48, depth=3, num_heads=4, patch_size=4, num_classes=5
    )
    drawn = network.init(jax.random.key(0))
    first = images(~is_new, rng, 900, 1)
    base = trained(network, drawn, first, epochs, optax.adam, 2e-3, batch_size=32)
    base = base.variables
    lora = ff.adapters.lora(rank=4, alpha=8, targets="qkv|proj|fc1")
    models = {
        "probe": ff.with_adapter(network, ff.adapters.head(), variables=base),
        "LoRA": ff.with_adapter(network, lora, variables=base),
        "all": network,
    }
    options = {"cohort_size": 100, "batch_size": 4, "local_epochs": 2}
    found, runs = {}, {}
    for name, model in models.items():
        start = base if model is network else model.init(jax.random.key(1))
        runs[name] = run = trained(
            model, start, train, rounds, optax.sgd, 0.1, **options
        )
        found[name] = ff.evaluate(run, model.output, test)["accuracy"]
        sent = sum(x.nbytes for x in jax.tree.leaves(run.variables))
        print(f"{name}: accuracy {found[name]:.3f}, {sent / 1000:.0f} kB a client")
    tuned = ff.merge_adapter(models["LoRA"], runs["LoRA"].variables)
    assert np.isfinite(network.output(tuned, test.dataset.images[:1])).all()
    ff.save_adapter(folder, models["LoRA"], runs["LoRA"].variables)
    return found


if __name__ == "__main__":
    main()
