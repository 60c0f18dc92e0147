"""Flower's simulation runtime: one Ray actor per core, FedAvg. Nodes are drawn by
the strategy, but the client whose data a node trains on is told with the model.

A round is what lies between two calls of the server's evaluation.
"""

import os
import pathlib
import tempfile

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent)  # of the actors

import flwr
import numpy as np
import torch
import workloads
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.simulation import run_simulation
from torch_models import accuracy, network, tensors, train


def client_app(folder: str, work) -> ClientApp:
    """Trains on the rows of the client it is told, read from memory-mapped files."""
    app = ClientApp()

    @app.train()
    def fit(message, context):
        del context
        torch.set_num_threads(1)
        client = message.content["told"]["client"]
        rows = [
            np.load(f"{folder}/{name}.npy", mmap_mode="r")[client]
            for name in ("images", "labels")
        ]
        model = network(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, *tensors(*rows), work)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": work.examples}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


class Told(FedAvg):
    """FedAvg whose nodes train the cohort of `workloads`, one client each."""

    def __init__(self, work, **settings):
        super().__init__(**settings)
        self.work = work

    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        clients = workloads.cohort(self.work, server_round - 1)
        for message, client in zip(messages, clients, strict=True):
            told = ConfigRecord({"client": int(client)})
            yield Message(
                content=RecordDict({**message.content, "told": told}),
                message_type=message.metadata.message_type,
                dst_node_id=message.metadata.dst_node_id,
            )


def server_app(work, num_rounds: int, clock, final: dict, evaluated) -> ServerApp:
    """FedAvg over a fraction of all nodes; leaves the last arrays in `final`."""
    app = ServerApp()

    def between(round, arrays):
        if round:
            clock.__exit__()
        final["arrays"] = arrays
        clock.evaluate(work, evaluated)
        clock.__enter__()
        return MetricRecord({"round": float(round)})

    @app.main()
    def run(grid, context):
        del context
        strategy = Told(
            work,
            fraction_train=work.cohort / work.population,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_evaluate_nodes=0,
            min_available_nodes=work.population,
        )
        if work.private:
            clip_norm, noise_multiplier, noise_cohort = work.private
            strategy = DifferentialPrivacyServerSideFixedClipping(
                strategy, noise_multiplier, clip_norm, noise_cohort
            )
        start = ArrayRecord(network(work).state_dict())
        strategy.start(grid, start, num_rounds=num_rounds, evaluate_fn=between)

    return app


def main():
    args = workloads.arguments(__doc__)
    (work, data), clock, final = workloads.inputs(args), workloads.Clock(), {}
    model, test = network(work), tensors(data.test_images, data.test_labels)

    def evaluated():
        model.load_state_dict(final["arrays"].to_torch_state_dict())
        return accuracy(model, *test)

    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/images.npy", data.images)
        np.save(f"{folder}/labels.npy", data.labels)
        ray = {"num_cpus": args.threads, "include_dashboard": False}
        ray |= {"logging_level": "ERROR", "log_to_driver": False}
        run_simulation(
            server_app=server_app(work, 1 + args.rounds, clock, final, evaluated),
            client_app=client_app(folder, work),
            num_supernodes=work.population,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": ray,
            },
        )
    version = f"{flwr.__version__}, torch {torch.__version__}"
    workloads.report(version, clock, accuracy=evaluated())


if __name__ == "__main__":
    main()
