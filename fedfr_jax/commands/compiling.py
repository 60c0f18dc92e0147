"""A config's own steps by the compilers of TPUs and GPUs, in a process of their own.

`compile_for` starts `python -m fedfr_jax.commands.compiling` with the same words in the
environment that has the compiler.
"""

import json
import os
import sys
from collections.abc import Sequence

import ml_collections

from fedfr_jax.build import sections
from fedfr_jax.commands.environments import run_in
from fedfr_jax.commands.flags import define, names, new_parser, parse
from fedfr_jax.plan.stand_in import unread
from fedfr_jax.runs.accelerators.topologies import kind_of, topology
from fedfr_jax.tasks import TASKS
from fedfr_jax.types import Experiment

MISTAKE = 2  # exit code of a config that is wrong
ABOUT = "Compile the programs of a config's rows for devices that need not be there."


def compile_for(device: str, words: Sequence[str]) -> dict:
    """{stage: {program: what `runs.accelerators.compiled.compiled` says}}.

    Args:
      device: such as v5p:4x4x8 or h200:1x1x8, see `topologies`.
      words: flags of a config: --config=NAME, --config.key=value, --rows=A,B.

    Raises:
      ValueError: for an unknown device, and for anything wrong in the config.
      OSError: when the compiler cannot be installed.
      ChildProcessError: with the end of what the process said, where it failed
        otherwise.
    """
    kind = kind_of(device)
    command = ["-m", "fedfr_jax.commands.compiling", f"--device={device}", *words]
    done = run_in(kind.extra, command, kind.environment)
    if done.returncode == MISTAKE:
        says = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"the config for {device} must build, but: {says}")
    if done.returncode:
        says = done.stderr[-4000:]
        raise ChildProcessError(f"{device} does not compile {words}:\n{says}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    """Print, as the last line, JSON of what the compiler says."""
    parser = new_parser("fedfr_jax.commands.compiling", ABOUT)
    define(parser, needs_workdir=False)
    parser.add_argument("--device", required=True, metavar="KIND:GRID")
    parser.add_argument("--rows", type=names, default=(), metavar="A,B")
    values = parse(parser, argv)
    from fedfr_jax.runs.accelerators.compiled import compiled_stages

    with topology(values.device):
        found = compiled_stages(without_images(values.config), values.rows)
    print(json.dumps(found))


def without_images(config: ml_collections.ConfigDict) -> Experiment:
    """The config's experiment, its images black and as many as there are, or would be;
    they lie where the config says."""
    settings = sections(config)
    black = unread(settings)
    where = settings["federation"].get("table", "auto")
    federation = {**black["federation"], "table": where}
    return TASKS[settings["task"]]({**black, "federation": federation})


def config_words(argv: Sequence[str]) -> list[str]:
    """Of a command's words, those about its config: --config, its changes, --rows, and
    the work folder that may keep it.

    >>> config_words(["--config", "demo", "--json=x", "--rows=a", "--config.seed=1"])
    ['--config=demo', '--rows=a', '--config.seed=1']
    >>> config_words(["--workdir=runs/a", "--compile"])
    ['--workdir=runs/a']
    """
    kept = []
    for i, word in enumerate(argv):
        if word in ("--config", "--rows", "--workdir") and i + 1 < len(argv):
            kept.append(f"{word}={argv[i + 1]}")
        elif word.startswith(("--config=", "--config.", "--rows=", "--workdir=")):
            kept.append(word)
    return kept


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        if "FEDFR_DEBUG" in os.environ:
            raise
        print(error, file=sys.stderr)
        sys.exit(MISTAKE)
