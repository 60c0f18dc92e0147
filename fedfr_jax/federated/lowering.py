"""Lowering and compiler options of a round."""

import gc
import os
import re
import threading
from collections.abc import Callable

import jax
from jax.sharding import Mesh

# XLA merges common subexpressions once more when it partitions for several devices, and
# what is merged decides what is fused and so how it is rounded.
CSE_PASS = "cse"
# LLVM's highest level takes 15 % longer over a round, which then is no faster.
OPTIMIZATION_LEVEL = 2


def compiler_options(mesh: Mesh, shards: int | None) -> dict[str, int | str]:
    """Compiler options of a round on the mesh, with `shards` partial sums.

    What XLA_FLAGS sets stays, but the canonical bits are always asked for.
    """
    level, disabled = "xla_backend_optimization_level", "xla_disable_hlo_passes"
    flags = os.environ.get("XLA_FLAGS", "")
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {level: OPTIMIZATION_LEVEL} if is_cpu and level not in flags else {}
    if shards is not None:
        disabled_passes = re.findall(rf"--{disabled}=(\S+)", flags)[-1:]
        options[disabled] = ",".join([*disabled_passes, CSE_PASS])
    return options


class Program:
    """A jitted function that runs rounds, with the state of its memory checks.

    Args:
      function: of `jax.jit`.
    """

    def __init__(self, function: Callable):
        self._function = function
        self.needs = {}  # {shapes of arguments: memory analysis}, checked
        self.fitting = set()  # {lanes and shapes of personal rows}, checked
        self.is_begun = False  # whether `compile_in_background` has been tried

    def __call__(self, *arguments):
        return self._function(*arguments)

    def lower(self, *arguments) -> jax.stages.Lowered:
        """Lower, as the jitted function does."""
        return self._function.lower(*arguments)

    def num_compiled(self) -> int:
        """Number of compilations so far."""
        return self._function._cache_size()


_COLLECTOR = threading.Lock()  # of the thread that has disabled garbage collection


def lowered(run, *arguments) -> jax.stages.Lowered:
    """`run.lower(*arguments)` without garbage collection, which saves time."""
    if not (gc.isenabled() and _COLLECTOR.acquire(blocking=False)):
        return run.lower(*arguments)
    gc.disable()
    try:
        return run.lower(*arguments)
    finally:
        gc.enable()
        _COLLECTOR.release()
