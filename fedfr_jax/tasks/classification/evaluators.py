"""How classification judges networks: in the federation, outside it, fine-tuned."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from fedfr_jax.federated.local import moving
from fedfr_jax.federated.simulation import simulation
from fedfr_jax.feed import Feed
from fedfr_jax.schema import AT_ONCE, call, check_ranges, check_whole, naming
from fedfr_jax.tasks.classification.accuracy import Accuracy
from fedfr_jax.tasks.classification.data import Clients
from fedfr_jax.tasks.classification.finetuning import finetuned, finetuning
from fedfr_jax.tasks.classification.loss import cross_entropy
from fedfr_jax.tasks.options import local_of
from fedfr_jax.tasks.representation import representation, told
from fedfr_jax.tasks.targets import with_target
from fedfr_jax.types import Augment, Evaluation, Evaluator, Model, Networks, PyTree


class Evaluating(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: int = 64  # test images at once on a device
    target_accuracy: float | None = None  # the table names the first round that has it
    # Every client's network is judged after training on the client's images as well:
    # keys of `local_of`, `epochs` and `moves`, a pattern of the leaves that train.
    finetune: Mapping | None = None
    # AMM of the one network's features of `most` test images; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: Mapping | None = None


FINETUNE = {"epochs": 1, "moves": ""}  # with the keys of `local_of`


def judge_of(
    settings: Mapping, model: Model, first: PyTree, plain: Augment | None
) -> Callable:
    """What config.evaluation asks for, checked, but for the images.

    Args:
      settings: keys of `Evaluating`.
      first: variables of the model, arrays or shapes.
      plain: what happens to an image before the network sees it.

    Returns:
      judge(clients, unseen or None, mesh, feed, **options) -> {name: Evaluator}; feed
      and options are those of a client's training.

    Raises:
      ValueError: for an unknown key, or a value out of its range.
    """
    asked = call("evaluation", Evaluating, settings)
    bounds = {"batch_size": AT_ONCE}
    if asked.target_accuracy is not None:
        bounds["target_accuracy"] = (0, 1)
    check_ranges("config.evaluation.", asked._asdict(), bounds)
    given = asked.finetune
    prepared = None if given is None else _finetuning(given, model, first)
    of_features = told(asked.representation, model, first)
    judged = Feed(asked.batch_size, plain)

    def judge(clients, unseen, mesh, feed, **options):
        groups = {"": clients} if unseen is None else {"": clients, "unseen": unseen}
        found = {}
        for group, of in groups.items():
            accuracy = Accuracy(of.test, of.test_offsets, mesh, judged)
            found |= accuracy.evaluators if not group else _unseen(accuracy)
            if prepared:
                name = f"{group}_finetuned".strip("_")
                tune = _after(prepared, of, mesh, feed, **options)
                found[name] = _tuned(accuracy, tune, is_unseen=bool(group))
        if of_features is not None:
            given = model, clients.test, mesh, judged
            found["representation"] = representation(*given, **of_features)
        return with_target(found, "accuracy", asked.target_accuracy)

    return judge


def _finetuning(settings, model, first) -> tuple:
    """(algorithm, epochs) of config.evaluation.finetune."""
    section = "evaluation.finetune"
    if jax.process_count() > 1:  # each would have the rows of some clients only
        raise ValueError(
            f"config.{section} must be left out in a run of several processes, got "
            f"{dict(settings)}."
        )
    settings = {**FINETUNE, **settings}
    check_whole(f"config.{section}.epochs", settings["epochs"], 1)
    epochs, moves = settings.pop("epochs"), settings.pop("moves")
    local = call(section, local_of, settings, cross_entropy(model))
    with naming(f"config.{section}.moves"):
        jax.eval_shape(lambda params: moving(moves, params)[0], first["params"])
    return finetuning(local, moves), epochs


def _after(prepared, clients: Clients, mesh: Mesh, feed: Feed, **options) -> Callable:
    """networks -> networks after fine-tuning; made ready when it is first called."""
    algorithm, epochs = prepared
    kept = []

    def tune(networks: Networks) -> Networks:
        if not kept:
            data = clients.train, clients.population
            given = {"mesh": mesh, "local_epochs": epochs, **options}
            kept.append(simulation(algorithm, feed, *data, **given))
        return finetuned(kept[0], networks)

    return tune


def _of_new(networks: Networks) -> Networks:
    """The networks of clients that never took part."""
    if networks.of_client is None:
        return networks
    return networks._replace(variables=None, of_client=networks.of_new)


def _unseen(accuracy: Accuracy) -> dict[str, Evaluator]:
    def evaluate(networks: Networks) -> Evaluation:
        return accuracy.personalised(_of_new(networks))

    return {"unseen": Evaluator(evaluate)}


def _tuned(accuracy: Accuracy, tune: Callable, *, is_unseen: bool) -> Evaluator:
    def evaluate(networks: Networks) -> Evaluation:
        networks = _of_new(networks) if is_unseen else networks
        return accuracy.personalised(tune(networks))

    return Evaluator(evaluate, in_rounds=False)
