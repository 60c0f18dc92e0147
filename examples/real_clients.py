"""Real clients: a server and three clients, each a process of its own, by Flower.

    pip install "fedfr_jax[flower]" scikit-learn
    python examples/real_clients.py scaffold fedfr

All on this machine; examples/flower_app has what server and clients run. Methods are
fedavg, scaffold, fedper, fedfr, quantized and private. In the end the network is that
of the simulation.
"""

import pathlib
import sys
import tempfile

import jax
import numpy as np

import fedfr_jax as ff

APP = pathlib.Path(__file__).parent / "flower_app"
sys.path.insert(0, str(APP))


def with_real_clients(methods, rounds):
    """{method: leaves of the server's network after `rounds`}."""
    import app
    import loopback

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with loopback.running(folder, app.NUM_CLIENTS) as (environment, _):
            for method in methods:
                loopback.run(APP, environment, method=method, num_server_rounds=rounds)
                found[method] = [*np.load(folder / "variables.npz").values()]
    return found


def simulated(method, rounds):
    """The same by the simulation."""
    import app

    parts = [app.own_digits(client) for client in range(app.NUM_CLIENTS)]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ids = np.repeat(np.arange(app.NUM_CLIENTS), [len(part[1]) for part in parts])
    data = ff.FederatedDataset.from_client_ids(x, y, ids)
    algorithm, variables = app.methods()[method]
    run = ff.init(algorithm, data, variables, **app.OPTIONS)
    for _ in range(rounds):
        run, metrics = ff.run_round(run)
        print(f"simulated: loss {metrics['loss'].mean():.4g}")
    return jax.tree.leaves(run.variables)


def main(*methods, rounds=3):
    """Train with real clients: {method: largest difference from the simulation}."""
    differences = {}
    for method, found in with_real_clients(methods or ["scaffold"], rounds).items():
        pairs = zip(found, simulated(method, rounds), strict=True)
        differences[method] = max(float(abs(a - b).max()) for a, b in pairs)
        print(f"{method}: differs from the simulation by {differences[method]:.1e}")
    return differences


if __name__ == "__main__":
    main(*sys.argv[1:])
