"""Checkpoints of a run's state with Orbax, each with a manifest of its files.

Checkpoints are written atomically, the manifest last.
"""

import logging
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from fedfr_jax import manifest, trees
from fedfr_jax import mesh as meshes
from fedfr_jax.runs import stage_folders
from fedfr_jax.runs.aside import set_aside
from fedfr_jax.types import PyTree

UNREAD = "commit_success.txt"  # of Orbax, written after the manifest
NO_FILES = MappingProxyType({})
FULL = "No space left on device"
KEEP = 2  # the newest, and one to fall back on when a disk damages it
# Errors of TensorStore and XLA where the file is not at fault; 2 is a missing file.
PASSING = re.compile("os_error_code='(?!2')|RESOURCE_EXHAUSTED")


_ALL_PROCESSES = ocp.options.MultiprocessingOptions()


def _this_process() -> ocp.options.MultiprocessingOptions:
    """Options of a manager whose folder only this process sees."""
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(here, {here}, f"process_{here}")


class _Digesting(ocp.StandardCheckpointHandler):
    """Orbax handler that writes the manifest of its files before they are renamed.

    It also writes the digest of the stage's settings, and the `files` {name: text} of
    the next checkpoint.
    """

    def __init__(self, settings: str = ""):
        super().__init__()
        self._settings = settings
        self.files = {}

    def finalize(self, directory):
        super().finalize(directory)
        folder = pathlib.Path(directory)
        if self._settings:
            (folder / stage_folders.DIGEST_FILE).write_text(self._settings + "\n")
        for name, text in self.files.items():
            (folder / name).write_text(text)
        manifest.write_all(folder, but_for=[UNREAD])


@ocp.args.register_with_handler(_Digesting, for_save=True)
class _Save(ocp.args.StandardSave):
    """Argument type of `_Digesting` for saving; Orbax finds the handler by it."""


@ocp.args.register_with_handler(_Digesting, for_restore=True)
class _Restore(ocp.args.StandardRestore):
    """Argument type of `_Digesting` for restoring."""


class Checkpointer:
    """Numbered checkpoints of one pytree under `folder`.

    A save is written aside and renamed when complete, so a killed process leaves the
    previous checkpoint as the newest. One whose files have changed since is damaged.

    Args:
      is_read_only: the folder exists, and stays as it is.
      is_mirrored: every process has a folder of its own, with all checkpoints.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        is_read_only: bool = False,
        is_mirrored: bool = False,
    ):
        self.folder = pathlib.Path(folder).resolve()
        self._handler = _Digesting(stage_folders.settings_digest(self.folder.parent))
        # Processes that share no folder do not wait for each other.
        self._is_alone = is_mirrored and jax.process_count() > 1
        alone = _this_process() if self._is_alone else _ALL_PROCESSES
        if not is_read_only:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers=self._handler,  # reads them in any process
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEEP,
                create=not (is_read_only or self._is_alone),
                enable_async_checkpointing=False,
                # All have the same list.
                single_host_load_and_broadcast=not self._is_alone,
                multiprocessing_options=alone,
            ),
        )

    def latest(self) -> int | None:
        """Number of the newest complete checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> tuple[int, ...]:
        """Numbers of all complete checkpoints, ascending."""
        return tuple(sorted(map(int, self._manager.all_steps())))

    def save(
        self, step: int, state: PyTree, *, files: Mapping[str, str] = NO_FILES
    ) -> None:
        """Save `state` as checkpoint `step`, atomically, with text `files` by name.

        Raises:
          OSError: when it cannot be written (a full disk); names what is left.
        """
        try:
            if self._is_alone:
                state = meshes.fetch(state)
            self._handler.files = files
            args = _Save(_step_of_folder(state))
            self._manager.save(step, args=args, force=True)
            self._manager.wait_until_finished()
        except Exception as error:
            is_full = FULL in str(error)  # among many words of TensorStore
            reason, last = FULL if is_full else _first_line(error), self.latest()
            left = f"the last whole one is {last}" if last else "there is none before"
            again = ": make room and start the same command again" if is_full else ""
            raise OSError(
                f"checkpoint {step} could not be written to {self.folder} ({reason}); "
                f"{left}{again}."
            ) from error

    def restore(
        self, template: PyTree, free: Callable[[str], bool] = lambda name: False
    ) -> tuple[int, PyTree] | None:
        """Restore the newest checkpoint that is readable: (step, like `template`).

        Args:
          free: path name of a leaf -> whether it keeps its saved shape, in host memory.

        Newer ones that are damaged are set aside as `<step>.damaged`. Returns None if
        there are no checkpoints.

        Raises:
          ValueError: when checkpoints exist and none fits; names the leaf that differs.
          OSError, MemoryError: when one could not be read for a transient reason; all
            are kept.
        """
        shapes = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, _step_of_folder(template)
        )
        steps = self.steps()[::-1]
        reasons = []
        for step in steps:
            leaves, fault = self._read(step, shapes, free)
            if _is_anywhere(fault is not None):
                reasons.append(f"{step}: {fault or 'what another process cannot read'}")
                continue
            self._set_aside([s for s in steps if s > step])
            if reasons and meshes.is_first_process():
                got = "; ".join(reasons)
                message = "%s: resuming from checkpoint %d; set aside as damaged: %s"
                logging.warning(message, self.folder, step, got)
            return step, _refill(template, leaves)
        if reasons:
            raise ValueError(
                f"checkpoints in {self.folder} must match the config's model and "
                "clients, got " + "; ".join(reasons) + "."
            )
        return None

    def why_unreadable(self, step: int) -> str | None:
        """Why checkpoint `step` cannot be read; None if it can."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        try:
            if fault := manifest.difference(self._place(step)):
                return fault
            saved = self._manager.item_metadata(step).tree
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), saved
            )
            args = _Restore(shapes)
            self._manager.restore(step, args=args)
        except Exception as error:  # any, as Orbax raises for a damaged file
            return _first_line(error)
        return None

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()

    def _set_aside(self, steps):
        """Rename damaged checkpoints, in the first process."""
        if not steps:
            return
        with meshes.first_process_first("damaged checkpoints"):
            if self._is_alone or meshes.is_first_process():
                for step in steps:
                    set_aside(self.folder / str(step), ".damaged")
        self._manager.reload()

    def _place(self, step):
        return self.folder / str(step) / "default"

    def _read(self, step, shapes, free):
        """Read (leaves, None); or (None, reason) if damaged or of another model.

        Without the manager, in whose barrier the others would wait for one that fails.
        Only the first process compares digests.
        """
        place = self._place(step)
        try:
            is_ours = self._is_alone or meshes.is_first_process()
            if is_ours and (fault := manifest.difference(place)):
                return None, fault
            shapes = self._as_saved(step, shapes, free)
            # Before Orbax begins to read: reads that it abandons print complaints when
            # the process ends.
            if self._is_other(step, shapes):
                return None, self._difference(step, shapes)
            args = _Restore(shapes)
            return self._handler.restore(place, args=args), None
        except Exception as error:
            if passing := _transient_error(error):
                kind = MemoryError if isinstance(passing, MemoryError) else OSError
                raise kind(
                    f"checkpoint {step} in {self.folder} could not be read and is kept "
                    f"({_first_line(passing)}). Start the same command again; if the "
                    "error stays, remove that checkpoint's folder."
                ) from error
            return None, self._difference(step, shapes) or _first_line(error)

    def _as_saved(self, step, shapes, free):
        names = [name for name in shapes if free(name)]
        if not names:
            return shapes
        saved = self._manager.item_metadata(step).tree
        host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        return shapes | {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host)
            for name, x in saved.items()
            if name in names
        }

    def _is_other(self, step, shapes) -> bool:
        """Whether a checkpoint has leaves of other names, shapes or dtypes."""
        try:
            saved = self._manager.item_metadata(step).tree
            kinds = lambda leaves: {
                name: (tuple(x.shape), str(x.dtype)) for name, x in leaves.items()
            }
            return kinds(saved) != kinds(shapes)
        except Exception:  # restoring it will raise the error
            return False

    def _difference(self, step, shapes):
        try:
            return trees.difference(self._manager.item_metadata(step).tree, shapes)
        except Exception:
            return None


def _transient_error(error: BaseException | None) -> BaseException | None:
    """The cause of an error that is transient: of a server, a limit or memory."""
    while error:
        is_missing = isinstance(error, FileNotFoundError)
        is_of_system = isinstance(error, OSError | MemoryError) and not is_missing
        if is_of_system or PASSING.search(str(error)):
            return error
        error = error.__cause__
    return None


def _first_line(error: BaseException) -> str:
    """First line of an error, without TensorStore's details of the file."""
    lines = str(error).partition(" [tensorstore")[0].strip().splitlines()
    return (lines or [type(error).__name__])[0]


def _is_anywhere(fact: bool) -> bool:
    """Whether `fact` is true in any process; a collective call."""
    return bool(multihost_utils.process_allgather(np.array(fact)).any())


def _step_of_folder(tree: PyTree) -> dict:
    """Leaves by path name, without empty ones, which Orbax refuses."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {trees.path_name(path): x for path, x in leaves if x.size}


def _refill(template: PyTree, leaves: dict) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: leaves.get(trees.path_name(path), x), template
    )
