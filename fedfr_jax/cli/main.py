"""Command line: fedfr <command> --config=... --workdir=..."""

import importlib
import inspect
import logging
import os
import pathlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import fedfr_jax
from fedfr_jax import distributed
from fedfr_jax.cli import program_cache, signals
from fedfr_jax.cli.exit_codes import EXPLAINED, MISTAKE, exit_code, explain
from fedfr_jax.schema import hint
from fedfr_jax.text import printable, without_secrets

USAGE = """\
usage: fedfr <command> --config=NAME [--config.section.key=value ...] [--workdir=DIR]
"""
HELP = """
fedfr <command> --help lists a command's flags and the sections of a config.

  --config=NAME    a Python file with get_config(), or a shipped config by its name
                   (fedfr configs), such as demo; evaluate, plan and prepare take the
                   config of the run in --workdir without it
  --config.section.key=value
                   changes a key, e.g. --config.federation.rounds=8; the keys of a
                   section are the arguments of the function that it configures
                   (fedfr describe models, sources, algorithms, ...); the keys of the
                   sections themselves: fedfr describe sections
  --workdir=DIR    folder of a run: checkpoints, results, plots
  --version        print the version"""


MODULES = {  # functions of modules of this package, imported when they run
    "train": "demo train evaluate",
    "prepare": "prepare",
    "plan": "plan",
    "launch": "launch",
    "sweep": "sweep",
    "replay": "replay",
    "runs": "report runs serve",
    "scaling": "scaling",
    "describe": "configs describe completion",
    "trained": "convert export embed verify enroll identify",
    "bench": "bench",
    "doctor": "doctor",
}
COMMANDS = {name: module for module, x in MODULES.items() for name in x.split()}


def help_text() -> str:
    """Help text: the commands with one line each, then flags and keys."""
    lines = [f"  {name:10} {about_command(name)}" for name in COMMANDS]
    return "\n".join([USAGE, *lines, HELP])


def main(argv: list[str]) -> int:
    """Run one command; a user error is one line and a code of `exit_codes`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] == "--version":
        print(f"fedfr_jax {fedfr_jax.__version__}")
        return 0
    # The one divides the cores among its processes, the other times them.
    if argv[0] not in ("launch", "bench"):
        distributed.use_every_core()
        program_cache.keep_programs()
    if argv[0] not in COMMANDS:
        near = hint(argv[0], COMMANDS)
        print(f"command must be one of {sorted(COMMANDS)}, got {argv[0]!r}{near}.")
        return MISTAKE
    return run_command(argv[0], argv[1:])


def load_command(name: str) -> Callable:
    """Import the function of a command."""
    module = importlib.import_module(f"fedfr_jax.cli.{COMMANDS[name]}")
    return vars(module)[name]


def about_command(name: str) -> str:
    """First line of a command's docstring, without importing it."""
    path = pathlib.Path(__file__).with_name(f"{COMMANDS[name]}.py")
    text = path.read_text().partition(f"\ndef {name}(")[2].partition('"""')[2]
    return text.partition("\n")[0].rstrip(".")


def run_command(name: str, argv: list[str]) -> int:
    """Run a command on its arguments; return the exit code."""
    try:
        from fedfr_jax.cli import flags

        flags.run(name, load_command(name), argv)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except BrokenPipeError:  # the output's reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        error = explain(error)
        if os.environ.get("FEDFR_DEBUG") or not isinstance(error, EXPLAINED):
            raise
        text = without_secrets(str(error))
        text = printable(text, keep="\n")  # it may quote an unknown file
        print(text or type(error).__name__, file=sys.stderr)
        print("(FEDFR_DEBUG=1 shows where.)", file=sys.stderr)
        return exit_code(error)
    return 0


def print_no_error_twice() -> list:
    """Suppress what threads and libraries print of errors that are raised as well.

    Returns:
      A list to which the errors of threads are added.
    """
    for name in ("absl", "asyncio"):  # Orbax writes to both
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # Pillow's
    # Callbacks of TensorStore fail by the hundred after a save that could not be
    # written; `run` prints the rest.
    sys.excepthook = lambda *_: None
    sys.unraisablehook = print_of_an_object
    of_threads = []
    threading.excepthook = of_threads.append
    return of_threads


def print_of_an_object(failed) -> None:
    """Print an uncaught error, unless it is from a library's callback.

    Orbax's reads are coroutines. When one fails, hundreds of others are dropped, and
    each raises when it is collected.
    """
    is_dropped = failed.object is None or inspect.iscoroutine(failed.object)
    if not is_dropped:
        sys.__unraisablehook__(failed)


def run() -> None:
    """Entry point of the console script."""
    distributed.exit_with_parent()
    signals.exit_on_signals(sys.argv[1:])
    of_threads = []
    try:
        import ml_collections  # noqa: F401  and absl, which makes its own logger

        if not os.environ.get("FEDFR_DEBUG"):
            of_threads = print_no_error_twice()
        code = main(sys.argv[1:])
    except Exception as error:
        traceback.print_exc()
        code = exit_code(explain(error))
    if code == 0:
        for failed in of_threads:
            traceback.print_exception(failed.exc_value)
    distributed.exit_process(code)
