"""A trained network, out of a work folder or a file of weights."""

import functools
import hashlib
import inspect
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.build import build
from fedfr_jax.deploy.backbone import backbone_of
from fedfr_jax.deploy.calibration import CURVE, curve_of, run_curve
from fedfr_jax.deploy.inputs import from_pixels, metadata, recorded_in, summed
from fedfr_jax.deploy.read_only import check_place, read_only
from fedfr_jax.evaluation.verification import Roc
from fedfr_jax.federated.packing import unpack
from fedfr_jax.models import MODELS
from fedfr_jax.models.foreign import network_of, variables_of
from fedfr_jax.models.weights import Weights, read_weights
from fedfr_jax.notebook import is_saved
from fedfr_jax.runs.data_digest import ACCEPT
from fedfr_jax.runs.ended import networks
from fedfr_jax.runs.locks import lock_to_read
from fedfr_jax.runs.stage_folders import check_stages
from fedfr_jax.runs.workdir import CONFIG, kept_config
from fedfr_jax.schema import check_choice, choose, naming, with_tuples
from fedfr_jax.stacks import named
from fedfr_jax.tasks.network import with_name
from fedfr_jax.types import Experiment, Networks, Preprocessing, PyTree


class Network(NamedTuple):
    """A network that embeds images."""

    # (variables, images [B, H, W, C] as in training) -> [B, D], compiled when called
    apply: Callable
    variables: PyTree  # in host memory
    image_shape: tuple[int, ...]  # (H, W, C)
    # The config's section, where the variables are those of one of MODELS; None with
    # layers of a client's own behind it.
    model: Mapping[str, Any] | None = None
    # The curve of the run's own evaluation, computed when asked; None without a run
    roc: Callable[[], Roc | None] | None = None
    about: Mapping[str, str] = MappingProxyType({})  # where it is from
    recorded: Preprocessing | None = None  # how training had its images; None: unknown

    @property
    def preprocessing(self) -> Preprocessing:
        """How pictures are prepared: as recorded, else by the defaults."""
        return self.recorded or Preprocessing()

    def embed(self, images: np.ndarray, *, batch_size: int = 64) -> np.ndarray:
        """Embeddings [n, D] float32, as the run's evaluation compares them.

        Args:
          images: uint8 [n, H, W, C], resized and aligned as the training images were,
            see `deploy.pictures`; or float32 [n, D] where those were vectors.

        Raises:
          ValueError: for images of another shape or dtype.
        """
        dtype = np.dtype(np.uint8 if len(self.image_shape) == 3 else np.float32)
        if images.dtype != dtype or images.shape[1:] != self.image_shape:
            raise ValueError(
                f"images must be {dtype} [n, {', '.join(map(str, self.image_shape))}], "
                f"got {images.dtype} {images.shape}."
            )
        how, found = self.preprocessing, []
        embed = summed(functools.partial(self.apply, self.variables), how)
        for start in range(0, len(images), batch_size):
            part = images[start : start + batch_size]
            missing = min(batch_size, len(images)) - len(part)  # one shape: one compile
            filled = np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1))
            found.append(np.asarray(embed(from_pixels(filled, how)))[: len(part)])
        return np.concatenate(found)

    @property
    def weights(self) -> Weights:
        """Its leaves by name, with what opens them again.

        Raises:
          ValueError: when it has layers of a client's own behind one of MODELS.
        """
        if self.model is None:
            raise ValueError(
                "network must be one of MODELS to be written as weights, got one with "
                "a client's own layers behind it: take .onnx or .stablehlo."
            )
        leaves = jax.tree_util.tree_leaves_with_path(named(self.variables))
        shown = {"model": self.model, "image_shape": self.image_shape}
        shown = {k: json.dumps(v) for k, v in shown.items()}
        about = {**self.about, **shown, **metadata(self.recorded)}
        return Weights(
            {trees.path_name(path): np.asarray(x) for path, x in leaves}, about
        )

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that tell it from other networks."""
        kind = (self.image_shape, self.recorded) if self.recorded else self.image_shape
        digest = hashlib.sha256(repr(kind).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(named(self.variables)):
            digest.update(trees.path_name(path).encode() + np.asarray(leaf).tobytes())
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        name = self.model["name"] if self.model else "with layers of a client's own"
        return f"Network({name}, images {self.image_shape}, {dict(self.about)})"


def load(
    path: str | os.PathLike,
    *,
    method: str | None = None,
    client: int | None = None,
    data_changed: str | None = None,
) -> Network:
    """A trained network.

    Args:
      path: the work folder of a run, whose data have to be where config.json says (as
        `fedfr train --config.data.path=NEW` does of data that were moved); or a file
        of weights, see `models.weights`.
      method: a row of the run's methods, or "pretrained"; None takes the last one.
      client: number of a client, for its own network; None for the server's.
      data_changed: "accept" opens a run whose data have changed since its training,
        and takes thresholds from the data as they are.

    Raises:
      ValueError: for a path that is not there, a folder without a finished run, an
        unknown method or client, data that have changed, weights that are of no known
        network, or a notebook's run.
    """
    check_choice("data_changed", data_changed, (None, ACCEPT))
    path = os.path.expanduser(path)
    if is_saved(path):
        raise ValueError(
            f"{path} must be a work folder or a file of weights, got a run that "
            "ff.save wrote: ff.resume(run, path) continues it, for one that ff.init "
            "made alike, and run.variables are its network."
        )
    if not os.path.exists(path):
        raise ValueError(
            f"network must be a work folder or a file of weights, got {path}, which "
            "does not exist."
        )
    if pathlib.Path(path).is_dir():
        return _of_run(pathlib.Path(path), method, client, data_changed)
    if method is not None or client is not None:
        raise ValueError(
            f"method and client must come with a work folder, got the file {path}."
        )
    return network_from(read_weights(path), path)


def network_from(
    weights: Weights,
    path: str | os.PathLike,
    model: Mapping | None = None,
    image_shape: Sequence[int] | None = None,
) -> Network:
    """The network of weights, which are from `path`.

    Args:
      model: {"name": of MODELS, settings}; None finds it from names and shapes.
      image_shape: (H, W, C), likewise.
    """
    with naming(path):
        if model is None or image_shape is None:
            found, found_shape = network_of(weights)
            model, image_shape = model or found, image_shape or found_shape
        shape = tuple(image_shape)
        variables = variables_of(weights, model, shape)
        apply = _evaluation(choose("model", MODELS, as_run(model), shape))
        recorded = recorded_in(weights.about, shape[-1])
    roc = functools.partial(curve_of, weights.about.get(CURVE, ""))
    about = {"from": str(path)}
    return Network(apply, variables, shape, model, roc, about, recorded)


def _evaluation(model) -> Callable:
    return jax.jit(lambda variables, images: model.apply(variables, images)[0])


class Opened(NamedTuple):
    """A network of a run, as the run has it."""

    experiment: Experiment
    model: Mapping[str, Any]  # the config's section
    method: str
    variables: PyTree
    apply: Callable


def of_server(workdir: str | os.PathLike) -> PyTree:
    """Variables of the server's network at the end of a run's last row, on the host.

    Raises:
      ValueError: for a folder without a finished run, or a row without such a network.
    """
    opened = _opened(pathlib.Path(workdir), None, None, ACCEPT)
    return meshes.fetch(unpack(opened.variables))


def _of_run(workdir, method, client, changed) -> Network:
    opened = _opened(workdir, method, client, changed)
    about = {"from": str(workdir), "method": opened.method}
    about |= {} if client is None else {"client": str(client)}
    return _plain(opened, about)


def _opened(workdir, method, client, changed) -> Opened:
    if not (workdir / CONFIG).is_file():
        raise ValueError(f"{workdir} must hold a trained run, got no {CONFIG}.")
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
        found = networks(experiment, method, workdir, changed=changed)
        variables, apply = _chosen(
            found, client, experiment.task.population.num_clients
        )
    return Opened(experiment, model, method, variables, apply)


def as_run(model: Mapping) -> dict:
    """A config's model as it is deployed: in the parameters' float32, whatever training
    computes in, and its convolutions are convolutions to the compiler."""
    factory = MODELS.get(model["name"], lambda: None)
    takes = "implementation" in inspect.signature(factory).parameters
    model = {key: value for key, value in model.items() if key != "dtype"}
    return {**model, "implementation": "xla"} if takes else model


def _chosen(found: Networks, client: int | None, num_clients: int):
    """(variables, apply) of the server's network or a client's."""
    if client is not None and not 0 <= client < num_clients:
        raise ValueError(f"client must lie in [0, {num_clients}), got {client}.")
    if client is None and found.variables is None:
        raise ValueError(
            "client must be given where the server has no network of its own, got none."
        )
    if client is None or found.of_client is None:
        return found.variables, found.apply
    return found.of_client(client), found.client_apply


def _plain(opened: Opened, about) -> Network:
    """The network, as one of MODELS where it is one."""
    task = opened.experiment.task
    shape, recorded = tuple(task.dataset.image_shape), task.preprocessing
    variables = meshes.fetch(unpack(opened.variables))
    roc = functools.partial(run_curve, opened.experiment, variables, opened.apply)
    for model in _as_config(opened, variables, shape):
        built = choose("model", MODELS, as_run(model), shape)
        own = backbone_of(variables, jax.eval_shape(built.init, jax.random.key(0)))
        if own is not None:
            found = _evaluation(built), own, shape, model
            return Network(*found, roc, about, recorded)
    found = jax.jit(opened.apply), variables, shape, None
    return Network(*found, roc, about, recorded)


def _as_config(opened, variables, shape) -> list[Mapping[str, Any]]:
    """What the network may be of MODELS: as the config has it, or with the classes that
    a task has added; nothing where the config has keys of the task's own."""
    model = {k: v for k, v in opened.model.items() if k != "implementation"}
    known = inspect.signature(MODELS[model["name"]]).parameters
    is_output = not opened.experiment.task.is_of_features
    if not is_output or not {"name", *known} >= model.keys():
        return []
    if "num_classes" not in known or "num_classes" in model:
        return [model]
    images = jax.ShapeDtypeStruct((1, *shape), np.float32)
    outputs = jax.eval_shape(opened.apply, variables, images).shape[-1]
    with_classes = {**model, "num_classes": outputs}
    needs_classes = known["num_classes"].default is inspect.Parameter.empty
    return [with_classes] if needs_classes else [model, with_classes]
