"""A work folder belongs to one config and one process, and knows its seconds.

A config that changes goes on with the stages that it leaves as they are; the folder of
another stage is renamed to <stage>.old, and the stage is trained anew.
"""

import contextlib
import fcntl
import json
import math
import pathlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping

from fedfr_jax import mesh as meshes
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.sinks import write_summary, write_text
from fedfr_jax.runs.stage_settings import first_difference, touched, with_followers
from fedfr_jax.types import Stage

LOCK, CONFIG, OLD = ".lock", "config.json", ".old"


class Clock:
    """Seconds of a run, those of its interrupted starts included."""

    def __init__(self, path: pathlib.Path):
        _check_file(path)
        self._path, self._started = path, time.perf_counter()
        self._before = seconds_in(path)

    def note(self) -> float:
        """Total seconds so far, also written down."""
        total = self._before + time.perf_counter() - self._started
        write_summary(self._path, {"seconds": total})
        return total


def _check_file(path):
    """Raise ValueError for a folder where a run keeps a file."""
    if path.is_dir():
        raise ValueError(f"{path} must be a file, got a folder: move it away.")


def seconds_in(path):
    """Those that a file tells; a damaged one, which no result depends on, tells 0."""
    try:
        seconds = float(read_json(path)["seconds"])
        if not math.isfinite(seconds):
            raise ValueError(f"seconds must be finite, got {seconds}.")
        return seconds
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        print(f"{path} is damaged ({error!r}): seconds are counted from now on.")
        return 0.0


@contextlib.contextmanager
def claim_for_all(
    workdir: pathlib.Path,
    config: str,
    stages: Mapping[str, Stage] | None = None,
    *,
    is_fresh: bool = False,
    but_for: str = "",
    restart: Collection[str] = (),
) -> Iterator[None]:
    """`claim` by the first of several processes."""
    with contextlib.ExitStack() as stack:
        with meshes.first_before_others("work folder"):
            if meshes.is_first():
                lock = claim(
                    workdir,
                    config,
                    stages,
                    is_fresh=is_fresh,
                    but_for=but_for,
                    restart=restart,
                )
                stack.enter_context(lock)
        yield


def claim(
    workdir: pathlib.Path,
    config: str,
    stages: Mapping[str, Stage] | None = None,
    *,
    is_fresh: bool = False,
    but_for: str = "",
    restart: Collection[str] = (),
):
    """Keep `config` (JSON lines) beside the run, and others out of its folder.

    Args:
      stages: those of the config: it may differ from the one before in what leaves a
        trained stage as it is; the stages that it touches begin anew.
      is_fresh: empty the folder first, once it is locked.
      but_for: name of a top-level section that may differ.
      restart: names of stages that begin anew, with those that start from them.

    Returns:
      The lock, held as long as the object lives.

    Raises:
      ValueError: when the folder belongs to another config (naming the first line
        that differs) or another process uses it.
    """
    if stages:
        restart = with_followers(stages, restart)
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / LOCK).open("w")
    try:
        _hold(lock, workdir)
        if is_fresh:
            _empty(workdir)
        _check_file(workdir / CONFIG)
        if not (workdir / CONFIG).exists():
            _tell_of_stages_without_config(workdir, stages or {})
            write_text(workdir / CONFIG, config)
        if stages:
            _begin_anew(workdir, config, stages, restart)
        _check(workdir, config, but_for)
    except (OSError, ValueError):
        lock.close()
        raise
    return lock


def _hold(lock, workdir):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(
            f"{workdir} must be used by one process, got two: wait for the other."
        ) from None


def _empty(workdir):
    """Remove all but the lock, which this process holds; last what says whose it is."""
    for path in sorted(workdir.iterdir(), key=lambda path: path.name == CONFIG):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _tell_of_stages_without_config(workdir, stages):
    """Say it when nothing tells of what config the stages that are trained are."""
    found = [name for name in stages if _is_trained(workdir / name)]
    if found:
        print(
            f"{workdir / CONFIG} is gone: {', '.join(found)} are taken to be of this "
            "command's config, which nothing can compare.",
            flush=True,
        )


def _begin_anew(workdir, config, stages, restart):
    """Set aside what `config` touches and what is named; the rest stays."""
    old, new = _kept_config(workdir), json.loads(config)
    changed = touched(stages, old, new)
    trained = {name for name in stages if _is_trained(workdir / name)}
    lost, kept = trained & (changed | restart), trained - changed - restart
    if lost - restart and not kept:
        return  # another run's folder, which `_check` refuses
    for name in changed | restart:
        _set_aside(workdir / name)
    write_text(workdir / CONFIG, config)
    if lost:
        print(_says(stages, kept, lost, first_difference(old, new)), flush=True)


def _says(stages, kept, lost, difference) -> str:
    """One line: why, which stages are kept and which are trained anew."""
    listed = lambda names: ", ".join(name for name in stages if name in names) or "none"
    why = "Asked to restart"
    if difference:
        key, before, now = difference
        why = f"config.{key} was {before} and is {now}"
    return (
        f"{why}: kept are {listed(kept)}; trained anew are {listed(lost)}, whose "
        f"folders are now called *{OLD}."
    )


def _is_trained(folder):
    return any((folder / "checkpoints").glob("[0-9]*"))


def _set_aside(folder):
    """Rename a stage's folder; one without a checkpoint is removed."""
    old = folder.with_name(folder.name + OLD)
    if _is_trained(folder):
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    elif folder.exists():
        shutil.rmtree(folder)


def _kept_config(workdir) -> dict:
    path = workdir / CONFIG
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(
            f"{path} must be the JSON of the run's config, but: {error} Put a copy "
            "back, or move it away and train on with the config that the run began "
            "with, which is then not compared; what is trained stays."
        ) from error


def _check(workdir, config, but_for):
    found = first_difference(_kept_config(workdir), json.loads(config), but_for)
    if found:
        key, before, now = found
        raise ValueError(
            f"{workdir / CONFIG} must equal the config of this command to go on, got "
            f"{key} {before} there and {now} here; take another --workdir, or "
            "--overwrite."
        )
