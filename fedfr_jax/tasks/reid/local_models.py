"""Every client's local model: what its own training makes of what it was handed.

FedPav judges the models (w_k, v_k) right after local training beside the aggregate.
Nobody keeps them for that: they are what a round of local training after the last one
leaves. That training is of its own settings, those of config.evaluation.local, and the
same for every row: what an algorithm adds to a client's training is left out, such as
FedProx's proximal term, so that rows differ in what they hand to the clients alone.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from fedfr_jax.federated.simulation import simulation
from fedfr_jax.schema import call, check_ranges
from fedfr_jax.tasks.classification.finetuning import finetuned, finetuning
from fedfr_jax.tasks.options import keywords, local_of
from fedfr_jax.tasks.reid.judge import Judge
from fedfr_jax.tasks.reid.loss import reid_loss
from fedfr_jax.types import Algorithm, Evaluation, Evaluator, Model, Networks

OWN = ("epochs", "identities")


def local_training_of(settings: Mapping, model: Model) -> tuple[Algorithm, int, int]:
    """(algorithm, epochs, identities of a batch or 0) of config.evaluation.local.

    Args:
      settings: those two, and keys of `local_of` and of `reid_loss`.

    Raises:
      ValueError: for an unknown key, a number out of its range, or several processes.
    """
    section = "evaluation.local"
    if jax.process_count() > 1:  # each would have the rows of some clients only
        raise ValueError(
            f"config.{section} must be left out in a run of several processes, got "
            f"{dict(settings)}."
        )
    settings = {"epochs": 1, "identities": 0, **settings}
    epochs, identities = (settings.pop(key) for key in OWN)
    numbers = {"epochs": epochs, "identities": identities}
    check_ranges(
        f"config.{section}.", numbers, {"epochs": (1, 1e6), "identities": (0, math.inf)}
    )
    of_loss = {k: settings.pop(k) for k in keywords(reid_loss) if k in settings}
    loss = call(section, reid_loss, of_loss, model)
    local = call(section, local_of, settings, loss)
    return finetuning(local), epochs, identities


def once(personalised: Evaluator, num_clients: int, classifier: str) -> Evaluator:
    """An evaluator of clients' networks that looks at one where all find alike.

    Args:
      classifier: the leaves that features do not depend on, a key of the params.
    """

    def body(variables):
        params = {k: x for k, x in variables["params"].items() if k != classifier}
        return jax.tree.leaves((params, variables["batch_stats"]))

    def are_equal(networks: Networks) -> bool:
        shared = body(networks.variables)
        return all(
            np.array_equal(x, y)
            for client in range(num_clients)
            for x, y in zip(shared, body(networks.of_client(client)), strict=True)
        )

    def evaluate(networks: Networks) -> Evaluation:
        is_known = networks.variables is not None and networks.of_client is not None
        if is_known and are_equal(networks):
            networks = networks._replace(of_client=None)
        return personalised.evaluate(networks)

    return personalised._replace(evaluate=evaluate)


def local_models(judge: Judge, algorithm: Algorithm, *data, **options) -> Evaluator:
    """The evaluator that judges clients' networks after training, in the end.

    Args:
      algorithm: of `finetuning`.
      data, options: of the `simulation` that trains: feed, examples, population; mesh,
        local_epochs, lanes, seed.
    """
    kept = []

    def after(networks: Networks) -> Networks:
        if not kept:
            kept.append(simulation(algorithm, *data, **options))
        return finetuned(kept[0], networks)

    def evaluate(networks: Networks) -> Evaluation:
        if networks.of_client is None:  # a central network has no client's classifier
            return Evaluation()
        return judge.personalised(after(networks))

    return Evaluator(evaluate, in_rounds=False)
