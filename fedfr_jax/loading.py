"""Trained models of runs: the server's or a client's.

The server's is read from the files of its stage, `models.saved_model`. A client's needs
its personal state in the run, so the experiment is built again, from a config that may
come from a stranger: nothing that it names is written, and what only training needs
(teachers and their caches) is left out.
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
from fedfr_jax.data.sources.npz import ReadOnly
from fedfr_jax.deploy.trained_model import (
    TrainedModel,
    as_run,
    evaluation_of,
    open_network,
)
from fedfr_jax.evaluation.verification import Roc
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.models import build_model
from fedfr_jax.plan.dummy_inputs import is_there, with_dummy_teachers
from fedfr_jax.runs.data_digest import ACCEPT
from fedfr_jax.runs.locks import lock_to_read
from fedfr_jax.runs.remote import fetch, is_model
from fedfr_jax.runs.restore import load_models
from fedfr_jax.runs.stage_folders import check_stages
from fedfr_jax.runs.workdir import CONFIG, kept_config
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import check_choice, naming, with_tuples
from fedfr_jax.tasks.model import with_name
from fedfr_jax.types import Experiment, PyTree, TrainedModels


def backbone_of(variables, template) -> PyTree | None:
    """Find variables like `template` within deployed variables; None: absent."""

    def names(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {trees.path_name(path): jnp.shape(x) for path, x in leaves}

    wanted = names(jax.eval_shape(by_block_name, template))
    if names(by_block_name(variables)) == wanted:
        return variables
    params = variables.get("params", {})
    if "backbone" in params and "branch" not in params:
        return backbone_of({**variables, "params": params["backbone"]}, template)
    return None


SOURCES = ("data", "partition")
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
      path: the work folder of a run, which may be in a bucket (its URL), the folder of
        one of its stages, or a file of weights, see `models.weights`.
      method: a row of the run's methods, or "pretrained"; None takes the last one.
      client: number of a client, for its own network; None for the server's. The data
        of the run have to be where its config.json says.
      data_changed: "accept" takes a client's network of a run whose data have changed
        since its training, and its thresholds from the data as they are.

    Raises:
      ValueError: for a path that is not there, a folder without a finished run, an
        unknown method or client, data that have changed, weights that are damaged or of
        no known network, or a notebook's run.
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
        kept = kept_config(workdir)
        with naming(workdir / CONFIG):
            settings = with_tuples(kept)
            model = with_name(settings.get("task", "faces"), settings["model"])
            settings = read_only({**settings, "model": as_run(model)})
        check_place(workdir, settings.get("data"))
        experiment = build(settings)
        check_stages(workdir, experiment.stages, kept)
        method = method or list(experiment.stages)[-1]
        found = load_models(experiment, method, workdir, changed=changed)
        count = experiment.task.population.num_clients
        if not 0 <= client < count:
            raise ValueError(f"client must be in [0, {count}), got {client}.")
        variables, apply = found.variables, found.apply
        if found.client_variables is not None:
            variables, apply = found.client_variables(client), found.client_apply
        variables = meshes.fetch(unpack(variables))
    about = {"from": str(workdir), "method": method, "client": str(client)}
    config = experiment.stages[method].trainer.model_config
    return _network(experiment, config, variables, apply, about)


def _network(
    experiment: Experiment,
    config: Mapping[str, Any] | None,
    variables: PyTree,
    apply: Callable,
    about: Mapping[str, str],
) -> TrainedModel:
    """Wrap a client's model, with `config` if that builds this model."""
    task, own = experiment.task, None
    if config is not None:
        config = {k: v for k, v in config.items() if k != "conv_implementation"}
        model = build_model(as_run(config), task.dataset.input_shape)
        own = backbone_of(variables, jax.eval_shape(model.init, jax.random.key(0)))
    known = own is not None
    return TrainedModel(
        apply=evaluation_of(model, task.is_of_features) if known else jax.jit(apply),
        variables=own if known else variables,
        input_shape=task.dataset.input_shape,
        model=config if known else None,
        roc=functools.partial(run_curve, experiment, variables, apply),
        metadata=about,
        recorded=task.preprocessing,
        is_of_features=known and task.is_of_features,
    )


def run_curve(experiment: Experiment, variables: PyTree, apply: Callable) -> Roc | None:
    """ROC of the run's evaluation on unseen identities; None: no verification."""
    evaluator = experiment.task.evaluators.get("generic")
    if evaluator is None:
        return None
    models = TrainedModels(variables, apply, None, apply)
    return evaluator.evaluate(models).curves.get("roc")


def read_only(settings: Mapping) -> dict:
    """Config sections of a trained model: read-only caches, and no teachers."""
    keep = {name: _sources(settings[name]) for name in SOURCES if name in settings}
    if isinstance(settings.get("evaluation"), Mapping):
        evaluation = {k: v for k, v in settings["evaluation"].items() if k != REFERENCE}
        keep["evaluation"] = evaluation
    if isinstance(settings.get("pretrain"), Mapping):
        keep["pretrain"] = _untaught(settings["pretrain"], settings)
    if isinstance(rows := settings.get("methods"), Mapping):
        keep["methods"] = {k: _untaught(row, settings) for k, row in rows.items()}
    return {**settings, **keep}


def check_place(workdir: pathlib.Path, data: Any) -> None:
    """Raise ValueError if the data of a run, config.data, do not exist."""
    data = data if isinstance(data, Mapping) else {}
    key = "path" if "path" in data else "data_dir"
    place = data.get(key)
    is_local = isinstance(place, str) and "://" not in place
    if is_local and not pathlib.Path(place).expanduser().exists():
        raise ValueError(
            f"{workdir} needs its data at the path in its config.json, {place}, which "
            "does not exist. If they moved, store the new path by `fedfr train "
            f"--workdir={workdir} --config.data.{key}=NEW`; finished stages are not "
            "trained again."
        )


def _sources(value: Any) -> Any:
    """Sources in settings, at any depth, with read-only caches."""
    if not isinstance(value, Mapping):
        return value
    if value.get("name") in ("tfds", "femnist10") and not is_there(value):
        raise ValueError(
            "config.data must be prepared before a model is loaded, but "
            f"{dict(value)} does not exist. Run `fedfr prepare` with its config."
        )
    found = {key: _sources(of) for key, of in value.items()}
    if isinstance(found.get("cache"), str):
        found["cache"] = ReadOnly(found["cache"])
    return found


def _untaught(row: Any, settings: Mapping) -> Any:
    """A method whose teacher is replaced by a dummy."""
    if not isinstance(row, Mapping):
        return row
    return with_dummy_teachers(row, settings["model"], lambda line: None)
