"""Finished stages of runs beside: a run of equal settings need not train them."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator, Mapping

from fedfr_jax import digest_json
from fedfr_jax.runs import data_digest
from fedfr_jax.runs.begin import end_of
from fedfr_jax.runs.ended import check_end
from fedfr_jax.runs.stage_folders import is_trained
from fedfr_jax.runs.stage_settings import settings_of
from fedfr_jax.runs.workdir import CONFIG
from fedfr_jax.types import Experiment


def borrow(
    experiment: Experiment, folder: pathlib.Path, changed: str | None = None
) -> None:
    """Copy into `folder` every stage that a run beside it has finished.

    That is one whose training depends on the same settings, and whose networks are
    judged the same.

    Args:
      folder: of the run, with its config; runs beside it are its siblings.
      changed: as of `data_digest.check`.

    Raises:
      ValueError: when the data have changed since the stage was trained.
    """
    own = digest_json.read(folder / CONFIG)
    for name in experiment.stages:
        if not is_trained(folder / name):
            for other in _finished(experiment, name, own, folder):
                data_digest.check(experiment.task, [other / name], changed=changed)
                draft = folder / f"{name}.tmp"
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(other / name, draft)
                shutil.rmtree(folder / name, ignore_errors=True)
                draft.rename(folder / name)
                print(f"{name} is that of {other}", flush=True)
                break


def _finished(
    experiment: Experiment, name: str, own: Mapping, folder: pathlib.Path
) -> Iterator[pathlib.Path]:
    """Folders of other runs that have this stage at its end."""
    stages = experiment.stages
    end = end_of(stages[name].trainer, experiment.federation.rounds)
    needs = settings_of(name, stages, own), own.get("evaluation") or {}
    for path in sorted(folder.parent.glob(f"*/{CONFIG}")):
        other = path.parent
        if other == folder or not (other / name).is_dir():
            continue
        with contextlib.suppress(ValueError):  # not at its end, or damaged
            config = digest_json.read(path)
            judged = config.get("evaluation") or {}
            if (settings_of(name, stages, config), judged) == needs:
                check_end(other / name / "checkpoints", end)
                yield other
