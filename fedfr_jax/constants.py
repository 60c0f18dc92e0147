"""Arrays that no step changes, as arguments of compiled programs.

A function that closes over an array has it as a literal in its program: compiled
slowly, once for each value, in the memory of each. One that reads a `Constant` gets an
argument of `jit`, wherever it is called: under vmap it has no axis of lanes, and it is
neither carried by a loop nor returned.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.schema import is_traced
from fedfr_jax.types import PyTree

_VALUES: contextvars.ContextVar[Mapping[int, PyTree]] = contextvars.ContextVar(
    "values of constants while a function is traced", default=MappingProxyType({})
)
_READ: contextvars.ContextVar["list[Constant] | None"] = contextvars.ContextVar(
    "constants that a function has read", default=None
)


class Constant:
    """A tree of arrays, whose shapes are known before its numbers."""

    created = 0  # how many there have been

    def __init__(self, shapes: PyTree):
        self.shapes = shapes
        self.number = Constant.created = Constant.created + 1
        self._arrays: PyTree = None
        self._placed: dict[Mesh, PyTree] = {}

    @property
    def is_set(self) -> bool:
        """Whether its numbers are known."""
        return self._arrays is not None

    @property
    def value(self) -> PyTree:
        """The program's argument; elsewhere the arrays, or zeros until they are set."""
        read = _READ.get()
        if read is not None and self not in read:
            read.append(self)
        argument = _VALUES.get().get(self.number)
        if argument is not None:
            return argument
        return self.zeros() if self._arrays is None else self._arrays

    def zeros(self) -> PyTree:
        """Numbers of which only the shapes count."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes)

    @contextlib.contextmanager
    def bound(self, value: PyTree) -> Iterator[None]:
        """Let a function that is traced read `value`."""
        token = _VALUES.set({**_VALUES.get(), self.number: value})
        try:
            yield
        finally:
            _VALUES.reset(token)

    def set(self, arrays: PyTree) -> None:
        """Set the numbers of the programs that run from now on, unless it is traced."""
        if not any(map(is_traced, jax.tree.leaves(arrays))):
            self._arrays, self._placed = arrays, {}

    def stand_for(self, other: "Constant") -> None:
        """Be another constant, whose numbers are set, in programs to come."""
        vars(self).update(vars(other))

    def on(self, mesh: Mesh, placement: Callable) -> PyTree:
        """The arrays on a mesh.

        Args:
          placement: (mesh, tree) -> sharding of each leaf.

        Raises:
          ValueError: before they are set.
        """
        if self._arrays is None:
            raise ValueError(
                "a model's frozen leaves must be set before it is trained, got none. "
                "Give their variables to ff.with_frozen."
            )
        if mesh not in self._placed:
            shardings = placement(mesh, self._arrays)
            self._placed[mesh] = meshes.put_global(self._arrays, shardings)
        return self._placed[mesh]

    def shapes_on(self, mesh: Mesh, placement: Callable) -> PyTree:
        """Shapes of the arrays on a mesh."""
        return meshes.shapes_at(self.shapes, placement(mesh, self.shapes))


class Jitted:
    """A compiled function; the `Constant`s that it reads are its first argument.

    Args:
      placement: (mesh, tree) -> sharding of each leaf of the constants.
      options: of `jax.jit`.
    """

    def __init__(self, function: Callable, mesh: Mesh, placement: Callable, **options):
        @functools.wraps(function)  # the program has its name
        def run(values, *arguments):
            with contextlib.ExitStack() as stack:
                for constant in self._constants or ():
                    stack.enter_context(constant.bound(values[constant.number]))
                return function(*arguments)

        if "donate_argnums" in options:  # the constants come first
            options["donate_argnums"] += 1
        self._plain = function
        self._function: Any = jax.jit(run, **options)
        self._place = mesh, placement
        self._constants: list[Constant] | None = None

    def _with_constants(self, value_of: Callable, arguments: tuple) -> tuple:
        if self._constants is None:
            self._constants = _read_by(self._plain, arguments)
        return {x.number: value_of(x) for x in self._constants}, *arguments

    def __call__(self, *arguments):
        value_of = lambda constant: constant.on(*self._place)
        return self._function(*self._with_constants(value_of, arguments))

    def shapes(self, *arguments) -> PyTree:
        """Shapes of the results; arguments may be shapes."""
        return jax.eval_shape(self._plain, *arguments)

    def lower(self, *arguments) -> jax.stages.Lowered:
        """Lower, as a jitted function does."""

        def value_of(constant):
            if constant.is_set and not meshes.available_devices():
                return constant.on(*self._place)
            return constant.shapes_on(*self._place)

        return self._function.lower(*self._with_constants(value_of, arguments))

    def num_compiled(self) -> int:
        """Number of compilations so far."""
        return self._function._cache_size()


def _read_by(function: Callable, arguments: tuple) -> list[Constant]:
    """Constants that a function reads, of arguments or their shapes."""
    if not Constant.created:
        return []
    token = _READ.set(read := [])
    try:
        jax.eval_shape(function, *arguments)
    finally:
        _READ.reset(token)
    return read


def jit(function: Callable, mesh: Mesh, placement: Callable, **options) -> Jitted:
    """`jax.jit(function, **options)` of the `Constant`s that it reads too."""
    return Jitted(function, mesh, placement, **options)
