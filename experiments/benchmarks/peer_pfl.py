"""apple/pfl-research with PyTorch: `SimulatedBackend` in one process."""

import importlib.metadata
import itertools
import logging

import torch
import workloads
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch_models import accuracy, network, tensors


class Classifier(torch.nn.Module):
    """The loss and the metrics are the module's own in pfl."""

    def __init__(self, work):
        super().__init__()
        self.network = network(work)

    def forward(self, images):
        return self.network(images)

    def loss(self, images, labels, eval=False):
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images, labels, eval=True):
        value = self.loss(images, labels, eval).item()
        return {"loss": Weighted.from_unweighted(value)}


class Rounds(TrainingProcessCallback):
    """Reads the clock between central iterations."""

    def __init__(self, work, evaluated):
        self.clock, self.work, self.evaluated = workloads.Clock(), work, evaluated

    def on_train_begin(self, *, model):
        self.clock.__enter__()
        return super().on_train_begin(model=model)

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.clock.__exit__()
        self.clock.evaluate(self.work, self.evaluated)
        self.clock.__enter__()
        return super().after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )


def main():
    logging.disable(logging.WARNING)
    flag = {"action": "store_true", "help": "with differential privacy"}
    args = workloads.arguments(__doc__, private=flag)
    torch.set_num_threads(args.threads)
    work, data = workloads.inputs(args)
    private = work.private
    if args.private:
        settings = workloads.CLIP_NORM, workloads.NOISE_MULTIPLIER, work.cohort
        private = workloads.Private(*settings)
    after = WeightByUser()
    if private:  # clipped by the client, noise once on the sum
        noise = private.noise_multiplier * work.cohort / private.noise_cohort
        noise = GaussianMechanism(private.clip_norm, noise)
        after = CentrallyAppliedPrivacyMechanism(noise)
    users = list(zip(*tensors(data.images, data.labels), strict=True))
    cohorts = (workloads.cohort(work, round) for round in itertools.count())
    order = itertools.chain.from_iterable(cohorts)
    dataset = FederatedDataset.from_slices(users, lambda: int(next(order)))
    module, test = Classifier(work), tensors(data.test_images, data.test_labels)
    rounds = Rounds(work, lambda: accuracy(module, *test))
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1 + args.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(
            training_data=dataset,
            val_data=dataset,
            postprocessors=[after],
        ),
        model,
        NNTrainHyperParams(
            local_learning_rate=work.rate,
            local_num_epochs=work.epochs,
            local_batch_size=work.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=1000),
        callbacks=[rounds],
    )
    version = f"{importlib.metadata.version('pfl')}, torch {torch.__version__}"
    workloads.report(version, rounds.clock, accuracy=accuracy(module, *test))


if __name__ == "__main__":
    main()
