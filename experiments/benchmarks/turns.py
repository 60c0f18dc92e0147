"""Programs that are timed in turns, on a machine whose speed changes."""

import json
import subprocess
from collections.abc import Mapping, Sequence


def fastest(commands: Mapping[str, Sequence[str]], repeats: int) -> dict[str, float]:
    """{name: least seconds of its runs}, each a process of its own.

    Args:
      commands: of programs whose last line is {"seconds": ...} as JSON.

    Raises:
      RuntimeError: with the last line of what a program that failed has said.
    """
    found = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            found[name].append(seconds_of(command))
    return {name: min(seconds) for name, seconds in found.items()}


def seconds_of(command: Sequence[str]) -> float:
    """What one program prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise RuntimeError(f"{command[1]} must run, got {said[-1][:300]}.")
    return json.loads(done.stdout.splitlines()[-1])["seconds"]
