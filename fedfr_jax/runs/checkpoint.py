"""Checkpoints of a stage's state with Orbax, each with a manifest of its files.

A checkpoint is written under another name, the manifest last, and renamed when it is
complete: a killed process leaves the previous one as the newest. It can be written in
the background, one at a time. That of a private stage has the ledger of its rounds.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import jax
import orbax.checkpoint as ocp

from fedfr_jax import manifest, trees
from fedfr_jax import mesh as meshes
from fedfr_jax.federated.privacy import ledger as ledgers
from fedfr_jax.federated.privacy.accountant import Accountant, continued
from fedfr_jax.federated.privacy.ledger import Ledger
from fedfr_jax.types import AnyArray, FederatedTrainer, PyTree

FOLDER = "checkpoints"  # of a stage
UNREAD = "commit_success.txt"  # of Orbax, written after the manifest
NO_FILES = MappingProxyType({})
FULL = "No space left on device"
KEEP = 2  # the newest, and one to go back to when a disk damages it
ALL_PROCESSES = ocp.options.MultiprocessingOptions()


def checkpoint_numbers(stage: pathlib.Path) -> list[int]:
    """Numbers of the checkpoints in a stage's folder, ascending."""
    names = (path.name for path in stage.glob(f"{FOLDER}/*/"))
    return sorted(int(name) for name in names if name.isdecimal())


def is_trained(stage: pathlib.Path) -> bool:
    """Whether a stage's folder has a checkpoint."""
    return bool(checkpoint_numbers(stage))


def files_of(stage: pathlib.Path, number: int) -> pathlib.Path:
    """Folder with the files of a stage's checkpoint."""
    return stage / FOLDER / str(number) / "default"


def check_end(stage: pathlib.Path, end: int) -> None:
    """Raise ValueError unless `end` is the newest checkpoint of a stage, and whole."""
    newest = max(checkpoint_numbers(stage), default=None)
    if newest != end:
        raise ValueError(
            f"{stage} must have the checkpoint {end}, got {newest}. Train it first."
        )
    if fault := manifest.difference(files_of(stage, end)):
        raise _damage(stage / FOLDER, end, fault)


def _damage(folder: pathlib.Path, step: int, fault: str) -> ValueError:
    return ValueError(
        f"checkpoint {step} in {folder} cannot be read: {fault}. Restore a copy of "
        f"{folder / str(step)}, or remove it to go on from the checkpoint before."
    )


class _Handler(ocp.StandardCheckpointHandler):
    """Orbax handler that adds text files and the manifest before the rename."""

    files: Mapping[str, str] = NO_FILES  # {name: text} of the next checkpoint

    def finalize(self, directory):
        super().finalize(directory)
        folder = pathlib.Path(directory)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        manifest.write_all(folder, but_for=[UNREAD])


@ocp.args.register_with_handler(_Handler, for_save=True)
class _Save(ocp.args.StandardSave):
    """Argument type of `_Handler` for saving; Orbax finds the handler by it."""


@ocp.args.register_with_handler(_Handler, for_restore=True)
class _Restore(ocp.args.StandardRestore):
    """Argument type of `_Handler` for restoring."""


def _one_copy(x: AnyArray) -> AnyArray:
    """A replicated leaf on one device, where it lies already.

    Orbax cuts copies into a part for each device, with a program for each of the parts.
    """
    is_copied = isinstance(x, jax.Array) and x.is_fully_replicated
    return x.addressable_data(0) if is_copied else x


class Checkpointer:
    """Numbered checkpoints of one pytree under `folder`.

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
        self._handler = _Handler()
        self._saving: int | None = None  # the checkpoint in the background
        # Processes that share no folder do not wait for each other.
        self._is_alone = is_mirrored and jax.process_count() > 1
        processes, here = ALL_PROCESSES, jax.process_index()
        if self._is_alone:
            processes = ocp.options.MultiprocessingOptions(
                here, {here}, f"process_{here}"
            )
        if not is_read_only:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers=self._handler,  # reads them in any process
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEEP,
                create=not (is_read_only or self._is_alone),
                # In the background processes would meet by names that they share.
                enable_async_checkpointing=not self._is_alone,
                # All have the same list.
                single_host_load_and_broadcast=not self._is_alone,
                multiprocessing_options=processes,
            ),
        )

    @property
    def stage(self) -> str:
        """Name of the stage whose checkpoints these are."""
        return self.folder.parent.name

    def latest(self) -> int | None:
        """Number of the newest checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> tuple[int, ...]:
        """Numbers of all complete checkpoints, ascending."""
        return tuple(sorted(map(int, self._manager.all_steps())))

    def save(
        self, step: int, state: PyTree, *, files: Mapping[str, str] = NO_FILES
    ) -> None:
        """`begin_save`, and wait until the checkpoint is complete."""
        self.begin_save(step, state, files=files)
        self.wait()

    def begin_save(
        self, step: int, state: PyTree, *, files: Mapping[str, str] = NO_FILES
    ) -> None:
        """Save `state` as checkpoint `step`, atomically, with text `files` by name.

        It is written in the background from a copy in host memory, once the one before
        is complete.

        Raises:
          OSError: when it, or the one before, cannot be written (a full disk); names
            what is left.
        """
        self.wait()
        with self._explained(step):
            if self._is_alone:
                state = meshes.fetch(state)
            elif jax.process_count() == 1:
                state = jax.tree.map(_one_copy, state)
            self._handler.files = files
            self._manager.save(step, args=_Save(_leaves_by_name(state)), force=True)
        self._saving = step

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete; raises as it does."""
        step, self._saving = self._saving, None
        if step is not None:
            with self._explained(step):
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            is_full = FULL in str(error)  # among many words of TensorStore
            reason, last = FULL if is_full else _first_line(error), self.last_complete()
            left = f"the last whole one is {last}" if last else "there is none before"
            again = ": make room and start the same command again" if is_full else ""
            raise OSError(
                f"checkpoint {step} could not be written to {self.folder} ({reason}); "
                f"{left}{again}."
            ) from error

    def last_complete(self) -> int | None:
        """Number of the newest checkpoint that is not in the background any more."""
        names = (path.name for path in self.folder.glob("*/"))
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def restore(
        self, template: PyTree, free: Callable[[str], bool] = lambda name: False
    ) -> tuple[int, PyTree] | None:
        """Restore the newest checkpoint as (step, like `template`); None without one.

        Args:
          free: path name of a leaf -> whether it keeps its saved shape, in host memory.

        Raises:
          ValueError: when it is damaged, or of another model; names what differs.
          OSError: when it cannot be read for another reason.
        """
        step = self.latest()
        if step is None:
            return None
        leaves, fault = {}, None
        try:
            leaves = self._read(step, _leaves_by_name(template), free)
        except ValueError as error:
            fault = error
        except Exception as error:  # any, as of Orbax, TensorStore and XLA
            text = f"checkpoint {step} in {self.folder} cannot be read"
            fault = OSError(f"{text}: {_first_line(error)}.")
            fault.__cause__ = error
        if is_anywhere(fault is not None):  # or the others would wait
            raise fault or OSError("another process could not read its checkpoint.")
        return step, _refill(template, leaves)

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()

    def _read(self, step: int, template: dict, free) -> dict:
        """Leaves of a checkpoint, read without the manager's barriers.

        In those the others would wait for a process that fails. Only the first process
        compares digests.
        """
        folder = self.folder / str(step) / "default"
        if self._is_alone or meshes.is_first_process():
            if fault := manifest.difference(folder):
                raise _damage(self.folder, step, fault)
        saved = self._manager.item_metadata(step).tree
        host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        shapes |= {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host)
            for name, x in saved.items()
            if name in shapes and free(name)
        }
        # Before Orbax begins to read: reads that it abandons print complaints when the
        # process ends.
        if difference := trees.difference(saved, shapes):
            raise ValueError(
                f"checkpoint {step} in {self.folder} must match the config's model and "
                f"clients, got {difference}."
            )
        restore: Callable = self._handler.restore  # which takes any path
        return restore(folder, args=_Restore(shapes))


def _first_line(error: BaseException) -> str:
    """First line of an error, without TensorStore's details of the file."""
    lines = str(error).partition(" [tensorstore")[0].strip().splitlines()
    return (lines or [type(error).__name__])[0].rstrip(".")


def is_anywhere(fact: bool) -> bool:
    """Whether `fact` is true in any process; a collective call."""
    return not meshes.is_everywhere(not fact)


def _leaves_by_name(tree: PyTree) -> dict:
    """Leaves by path name, without empty ones, which Orbax refuses."""
    return {name: x for name, x in trees.by_name(tree).items() if x.size}


def _refill(template: PyTree, leaves: dict) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: leaves.get(trees.path_name(path), x), template
    )


def ledger_files(accountant: Accountant | None, rounds: int) -> Mapping[str, str]:
    """Files of a checkpoint after that many rounds: the ledger of a private stage."""
    if accountant is None:
        return NO_FILES
    return {ledgers.FILE: ledgers.to_json(accountant.ledger(rounds))}


def read_ledger(stage: pathlib.Path, number: int) -> Ledger:
    """Read the ledger of a private stage's checkpoint; () of 0, before the first.

    Raises:
      ValueError: when the checkpoint has none, so that what it has spent is unknown.
    """
    if not number:
        return ()
    path = files_of(stage, number) / ledgers.FILE
    try:
        return ledgers.from_json(manifest.read_bytes(path).decode(), path)
    except FileNotFoundError as error:
        raise ValueError(
            f"checkpoint {number} of the private stage {stage} must have a "
            f"{ledgers.FILE} of the epsilon that it has spent, got none. Train it anew "
            f"with --overwrite={stage.name}."
        ) from error


def stage_accountant(
    trainer: FederatedTrainer, stage: pathlib.Path
) -> Accountant | None:
    """Accountant of a stage after the rounds of its newest checkpoint."""
    if trainer.accountant is None:
        return None
    newest = max(checkpoint_numbers(stage), default=0)
    return continued(trainer.accountant, read_ledger(stage, newest))
