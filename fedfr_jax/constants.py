"""Arrays that no step changes, as arguments of compiled programs.

A function that closes over an array has it as a literal in its program: compiled
slowly, once for each value, in the memory of each. One that reads a `Constant` gets an
argument of `jit`, wherever it is called: under vmap it has no axis of lanes, and it is
neither carried by a loop nor returned.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.types import PyTree

_ALIVE: "weakref.WeakValueDictionary[int, Constant]" = weakref.WeakValueDictionary()
_ARGUMENTS: contextvars.ContextVar[Mapping[int, PyTree]] = contextvars.ContextVar(
    "arguments of the program that is traced", default=MappingProxyType({})
)


@contextlib.contextmanager
def _values(constants: Mapping[int, PyTree]) -> Iterator[None]:
    token = _ARGUMENTS.set({**_ARGUMENTS.get(), **constants})
    try:
        yield
    finally:
        _ARGUMENTS.reset(token)


class Constant:
    """A tree of arrays, whose shapes are known before its numbers."""

    def __init__(self, shapes: PyTree):
        self.shapes = shapes
        self._arrays: PyTree = None
        self._placed: dict[Mesh, PyTree] = {}
        self._number = max(_ALIVE, default=0) + 1
        _ALIVE[self._number] = self

    @property
    def is_set(self) -> bool:
        """Whether its numbers are known."""
        return self._arrays is not None

    @property
    def value(self) -> PyTree:
        """The program's argument; elsewhere the arrays, or zeros to be traced."""
        argument = _ARGUMENTS.get().get(self._number)
        if argument is not None:
            return argument
        if self.is_set:
            return self._arrays
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes)

    def bound(self, value: PyTree) -> contextlib.AbstractContextManager[None]:
        """Context in which a function that is traced reads `value`."""
        return _values({self._number: value})

    def set(self, arrays: PyTree) -> None:
        """Set the numbers of the programs that run from now on."""
        self._arrays, self._placed = arrays, {}

    def on(self, mesh: Mesh, placement: Callable) -> PyTree:
        """The arrays on a mesh, or on described devices shapes; None until then.

        Args:
          placement: (mesh, tree) -> sharding of each leaf.
        """
        if meshes.available_devices():
            return meshes.shapes_at(self.shapes, placement(mesh, self.shapes))
        if self.is_set and mesh not in self._placed:
            shardings = placement(mesh, self._arrays)
            self._placed[mesh] = meshes.put_global(self._arrays, shardings)
        return self._placed.get(mesh)


class Jitted:
    """A compiled function of all `Constant`s that there are at its first call.

    Args:
      placement: (mesh, tree) -> sharding of each leaf of the constants.
      options: of `jax.jit`.
    """

    def __init__(self, function: Callable, mesh: Mesh, placement: Callable, **options):
        @functools.wraps(function)  # the program has its name
        def run(constants, *arguments):
            with _values(constants):
                return function(*arguments)

        if "donate_argnums" in options:  # `constants` come first
            options["donate_argnums"] += 1
        self._function: Any = jax.jit(run, **options)
        self._place = lambda constant: constant.on(mesh, placement)
        self._constants: dict[int, Constant] | None = None

    def _arguments(self) -> dict[int, PyTree]:
        if self._constants is None:
            self._constants = dict(_ALIVE)
        placed = {number: self._place(x) for number, x in self._constants.items()}
        return {number: x for number, x in placed.items() if x is not None}

    def __call__(self, *arguments):
        return self._function(self._arguments(), *arguments)

    def lower(self, *arguments) -> jax.stages.Lowered:
        """Lower, as a jitted function does."""
        return self._function.lower(self._arguments(), *arguments)

    def num_compiled(self) -> int:
        """Number of compilations so far."""
        return self._function._cache_size()


def jit(function: Callable, mesh: Mesh, placement: Callable, **options) -> Jitted:
    """`jax.jit(function, **options)` with arguments for all `Constant`s."""
    return Jitted(function, mesh, placement, **options)
