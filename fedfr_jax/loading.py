"""Trained models of runs: the global model, or a client's.

The global model is read from the files of its stage, `models.saved_model`. A client's
needs its personal state in the run, so the experiment is built again, from a config
that may not be trusted: no file that it names is written, and parts only for training
(teachers and their caches) are left out.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.api import is_saved
from fedfr_jax.config.build import build
from fedfr_jax.deploy.trained_model import (
    TrainedModel,
    compile_embedding,
    deployment_config,
    open_network,
)
from fedfr_jax.evaluation.verification import Roc
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.files import is_url
from fedfr_jax.models import build_model
from fedfr_jax.plan.dummy_inputs import is_there, with_dummy_teachers
from fedfr_jax.runs.buckets import fetch, is_model
from fedfr_jax.runs.data_digest import ACCEPT
from fedfr_jax.runs.locks import lock_to_read
from fedfr_jax.runs.stages import load_models
from fedfr_jax.runs.workdir import CONFIG, check_stages, stored_config
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import (
    check_choice,
    check_without_code,
    naming,
    with_tuples,
)
from fedfr_jax.tasks.model import with_name
from fedfr_jax.types import Experiment, PyTree, TrainedModels


def backbone_of(variables, template) -> PyTree | None:
    """Find variables like `template` within deployed variables; None: absent."""

    def shapes_by_name(tree):
        return {name: jnp.shape(x) for name, x in trees.by_name(tree).items()}

    expected = shapes_by_name(jax.eval_shape(by_block_name, template))
    if shapes_by_name(by_block_name(variables)) == expected:
        return variables
    params = variables.get("params", {})
    if "backbone" in params and "branch" not in params:
        return backbone_of({**variables, "params": params["backbone"]}, template)
    return None


SOURCES = ("data", "partition", "evaluation")
REFERENCE = "representation"  # of config.evaluation, which may name another run


def load_model(
    path: str | os.PathLike,
    *,
    method: str | None = None,
    client: int | None = None,
    data_changed: str | None = None,
) -> TrainedModel:
    """Load a trained model.

    Args:
      path: a run directory, which may be in a bucket (its URL), the folder of one of
        its stages, or a file of weights, see `models.weights`.
      method: one of the run's methods, or "pretrained"; None takes the last one.
      client: number of a client, for its personalized model; None for the global model.
        The run's data must exist at the path in its config.json.
      data_changed: "accept" uses a client's model of a run whose data have changed
        since its training, with thresholds from the current data.

    Raises:
      ValueError: for a missing path, a folder without a finished run, an unknown method
        or client, changed data, weights that are damaged or of an unknown network, or a
        file of `ff.save`.
    """
    check_choice("data_changed", data_changed, (None, ACCEPT))
    path = fetch(os.path.expanduser(path), is_model if client is None else None)
    if is_saved(path):
        raise ValueError(
            f"{path} must be a run directory or a weights file, got a run that ff.save "
            "wrote. Load it with ff.resume(run, path), run being from an equal "
            "ff.init, and use run.variables."
        )
    if not os.path.exists(path):
        raise ValueError(
            f"path must be a run directory or a weights file, got {path}, which does "
            "not exist."
        )
    if not os.path.isdir(path) and not method is client is None:
        raise ValueError(
            f"path must be a run directory with method or client, got the file {path}."
        )
    if client is None:
        return open_network(path, method)
    return client_network(pathlib.Path(path), method, client, data_changed)


def client_network(
    workdir: pathlib.Path, method: str | None, client: int, changed: str | None
) -> TrainedModel:
    """Load a client's model at the end of a stage, see `load_model`."""
    if not (workdir / CONFIG).is_file():
        raise ValueError(f"{workdir} must be a run directory, got no {CONFIG} in it.")
    with lock_to_read(workdir):
        config = stored_config(workdir)
        with naming(workdir / CONFIG):
            settings = with_tuples(config)
            check_without_code(settings, workdir / CONFIG)
            model = with_name(settings.get("task", "faces"), settings["model"])
            settings = read_only({**settings, "model": deployment_config(model)})
        check_data_path(workdir, settings["data"])
        experiment = build(settings)
        check_stages(workdir, experiment.stages, config)
        method = method or list(experiment.stages)[-1]
        models = load_models(experiment, method, workdir, changed=changed)
        count = experiment.task.population.num_clients
        if not 0 <= client < count:
            raise ValueError(f"client must be in [0, {count}), got {client}.")
        variables, apply = models.variables, models.apply
        if models.client_variables is not None:
            variables, apply = models.client_variables(client), models.client_apply
        variables = meshes.fetch(unpack(variables))
    about = {"from": str(workdir), "method": method, "client": str(client)}
    model_config = experiment.stages[method].trainer.model_config
    return _network(experiment, model_config, variables, apply, about)


def _network(
    experiment: Experiment,
    config: Mapping[str, Any] | None,
    variables: PyTree,
    apply: Callable,
    about: Mapping[str, str],
) -> TrainedModel:
    """Wrap a client's model, with `config` if that builds this model."""
    task, model, is_of_features = experiment.task, None, False
    roc = functools.partial(run_curve, experiment, variables, apply)
    embed = jax.jit(apply)
    if config is not None:
        network = build_model(deployment_config(config), task.dataset.input_shape)
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        backbone = backbone_of(variables, shapes)
        if backbone is not None:
            variables, model, is_of_features = backbone, config, task.is_of_features
            embed = compile_embedding(network, is_of_features)
    return TrainedModel(
        apply=embed,
        variables=variables,
        model=model,
        input_shape=task.dataset.input_shape,
        is_of_features=is_of_features,
        roc=roc,
        metadata=about,
        recorded=task.preprocessing,
    )


def run_curve(experiment: Experiment, variables: PyTree, apply: Callable) -> Roc | None:
    """ROC of the run's evaluation on unseen identities; None: no verification."""
    evaluator = experiment.task.evaluators.get("generic")
    if evaluator is None:
        return None
    models = TrainedModels(variables, apply, None, apply)
    return evaluator.evaluate(models).curves.get("roc")


def read_only(settings: Mapping) -> dict:
    """Config sections of a trained model: those of `writing_nothing`, and no reference.

    The reference may be another run, which need not be there.
    """
    settings = writing_nothing(settings)
    evaluation = settings.get("evaluation", {})
    evaluation = {k: v for k, v in evaluation.items() if k != REFERENCE}
    return {**settings, "evaluation": evaluation}


def writing_nothing(settings: Mapping) -> dict:
    """Config sections of a finished run: without caches and teachers."""
    methods, model = settings.get("methods", {}).items(), settings["model"]
    return {
        **settings,
        **{name: _sources(settings[name]) for name in SOURCES if name in settings},
        "pretrain": with_dummy_teachers(settings.get("pretrain", {}), model),
        "methods": {name: with_dummy_teachers(x, model) for name, x in methods},
    }


def check_data_path(workdir: pathlib.Path, data: Mapping) -> None:
    """Raise ValueError if the data of a run, config.data, do not exist."""
    key = "path" if "path" in data else "data_dir"
    path = data.get(key)
    if not isinstance(path, str) or is_url(path):
        return
    if not pathlib.Path(path).expanduser().exists():
        raise ValueError(
            f"{workdir} needs its data at the path in its config.json, {path}, which "
            "does not exist. If they moved, store the new path by `fedfr train "
            f"--workdir={workdir} --config.data.{key}=NEW`; finished stages are not "
            "trained again."
        )


def _sources(value: Any) -> Any:
    """Sources in settings, at any depth, without caches."""
    if not isinstance(value, Mapping):
        return value
    if value.get("name") in ("tfds", "femnist10") and not is_there(value):
        raise ValueError(
            "config.data must be prepared before a model is loaded, but "
            f"{dict(value)} does not exist. Run `fedfr prepare` with its config."
        )
    return {key: _sources(x) for key, x in value.items() if key != "cache"}
