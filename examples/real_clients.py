"""Real clients: a server and three clients, each a process of its own, by Flower.

    pip install "fedfr_jax[flower]" scikit-learn
    python examples/real_clients.py scaffold

All on this machine; examples/flower_app has what server and clients run. Methods are
fedavg, scaffold, fedper, quantized and private. In the end the network is that of the
simulation.
"""

import pathlib
import sys
import tempfile

import jax
import numpy as np

import fedfr_jax as ff

APP = pathlib.Path(__file__).parent / "flower_app"
sys.path.insert(0, str(APP))


def with_real_clients(method, rounds):
    """Leaves of the server's network after `rounds`."""
    import app
    import loopback

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with loopback.running(folder, app.NUM_CLIENTS) as (environment, _):
            loopback.run(APP, environment, method=method, num_server_rounds=rounds)
        return [*np.load(folder / "variables.npz").values()]


def simulated(method, rounds):
    """The same by the simulation."""
    import app

    parts = [app.own_digits(client) for client in range(app.NUM_CLIENTS)]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ids = np.repeat(np.arange(app.NUM_CLIENTS), [len(part[1]) for part in parts])
    algorithms, variables = app.methods()
    data = ff.FederatedDataset.from_client_ids(x, y, ids)
    run = ff.init(algorithms[method], data, variables, **app.OPTIONS)
    for _ in range(rounds):
        run, metrics = ff.run_round(run)
        print(f"simulated: loss {metrics['loss'].mean():.4g}")
    return jax.tree.leaves(run.variables)


def main(method="scaffold", rounds=3):
    """Train with real clients; the largest difference from the simulation."""
    found = with_real_clients(method, rounds)
    pairs = zip(found, simulated(method, rounds), strict=True)
    difference = max(float(abs(a - b).max()) for a, b in pairs)
    print(f"{method}: largest difference from the simulation {difference:.1e}")
    return difference


if __name__ == "__main__":
    main(*sys.argv[1:])
