"""The launcher: python -m fedfr_jax <command> --config=... --workdir=..."""

import os
import sys
import traceback

from fedfr_jax import processes

HELP = """usage: fedfr <command> --config=FILE [--config.key=value ...] [--workdir=DIR]

  train      pretrain, then train every method of the config; goes on after a stop
  evaluate   judge the checkpoints of a run again
  prepare    inspect the config's data set and how it is split
  launch     run a command as several processes of this machine

fedfr <command> --help lists a command's flags."""


def main(argv: list[str]) -> int:
    """Run one command; a user's mistake is one line and exit code 2."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if argv[0] != "launch":  # which deals the cores to the processes that it starts
        processes.use_every_core()
    from fedfr_jax.commands import COMMANDS

    if argv[0] not in COMMANDS:
        print(f"command must be one of {sorted(COMMANDS)}, got {argv[0]!r}.")
        return 2
    command = COMMANDS[argv[0]]
    if {"-h", "--help"} & set(argv[1:2] if argv[0] == "launch" else argv[1:]):
        print(f"{command.__doc__}\n\n  fedfr {command.main.__doc__}\n")
        print("FILE is a Python file with get_config(); its keys are those of the")
        print("functions that it configures, and --config.key=value changes one.")
        return 0
    try:
        command.main(argv[1:])
    except (ValueError, ImportError, OSError, FloatingPointError, MemoryError) as error:
        if os.environ.get("FEDFR_DEBUG"):
            raise
        print(str(error) or type(error).__name__, file=sys.stderr)
        print("(FEDFR_DEBUG=1 shows where.)", file=sys.stderr)
        return 2
    return 0


def run() -> None:
    """Entry point of the console script."""
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    processes.end(code)


if __name__ == "__main__":
    run()
