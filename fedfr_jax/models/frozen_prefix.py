"""What a model computes of its input alone, with frozen leaves: features of an example.

The program of a model with frozen leaves is cut in two: operations that depend on the
input but on no variable and no random key, the prefix, and all others. The arrays that
cross the cut are the features of an example. They are computed once; a model is then
trained on them in place of images, `{"features": [B, D]}`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from fedfr_jax.types import Model, PyTree, input_structs

FEATURES = "features"  # an input's name
CALLS = ("jit", "pjit", "closed_call", "core_call")  # operations that are a program
WORK = ("dot_general", "conv_general_dilated")


class Cut(NamedTuple):
    """A model's program for a batch, cut in two."""

    prefix: Callable  # (frozen leaves, x) -> arrays that cross the cut
    rest: Callable  # (arrays that cross, variables, frozen leaves, key) -> outputs
    crossing: list[jax.ShapeDtypeStruct]  # [B n, ...] each
    has_work: bool  # whether the prefix multiplies matrices or convolves


def cut(model: Model, variables: PyTree, x: PyTree, train: bool, key: PyTree) -> Cut:
    """Cut the program of a model with frozen leaves.

    Args:
      variables, x, key: arrays or shapes, x of [B, ...].
    """
    function = model.apply_with_features or model.apply

    def run(frozen, x, variables, key):
        with model.frozen.bound(frozen):
            return function(variables, x, train, key=key)

    arguments = jax.tree.map(_struct, (model.frozen.shapes, x, variables, key))
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
    consts = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    equations, values = _without_calls(program.jaxpr, consts, {})
    outputs = [values.get(v, v) if _is_var(v) else v for v in program.jaxpr.outvars]
    sizes = [len(jax.tree.leaves(tree)) for tree in arguments]
    frozen, images, moving, keys = _split(program.jaxpr.invars, sizes)
    prefix, rest, of_input = _sort(equations, images, [*moving, *keys])
    needed = [v for equation in rest for v in equation.invars]
    needed = dict.fromkeys(v for v in [*needed, *outputs] if _is_var(v))
    crossing = [v for v in needed if v in of_input]
    fixed = [e for e in prefix if not of_input & {*e.outvars}]
    part = functools.partial(_function, program.jaxpr, consts)
    run_prefix = part(prefix, [*frozen, *images], crossing)
    run_rest = part(fixed + rest, [*crossing, *moving, *frozen, *keys], outputs)
    leaves = lambda *trees: jax.tree.leaves(trees)
    return Cut(
        lambda *arguments: run_prefix(*leaves(*arguments)),
        lambda *x: jax.tree.unflatten(
            jax.tree.structure(shapes), run_rest(*leaves(*x))
        ),
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in crossing],
        any(e.primitive.name in WORK for e in prefix if of_input & {*e.outvars}),
    )


def _struct(x):
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x))


def _split(variables, sizes):
    ends = np.cumsum(sizes)
    return [variables[end - n : end] for end, n in zip(ends, sizes, strict=True)]


def _sort(equations: list, images: list, moving: list) -> tuple[list, list, set]:
    """(equations without a moving input, the others, what depends on images alone)."""
    of_moving, of_input, prefix, rest = {*moving}, {*images}, [], []
    for equation in equations:
        read = {v for v in equation.invars if _is_var(v)}
        is_moving = bool(read & of_moving or equation.effects)
        (rest if is_moving else prefix).append(equation)
        if is_moving:
            of_moving |= {*equation.outvars}
        elif read & of_input:
            of_input |= {*equation.outvars}
    return prefix, rest, of_input


def _function(jaxpr, consts, equations, inputs, outputs):
    """Function of variables that evaluates some equations of a program."""
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    invars = [*consts, *inputs]
    part = jaxpr.replace(
        constvars=[], invars=invars, outvars=outputs, eqns=equations, debug_info=names
    )
    return functools.partial(jaxpr_as_fun(ClosedJaxpr(part, ())), *consts.values())


def _is_var(v) -> bool:
    return isinstance(v, Var)


def _without_calls(jaxpr: Jaxpr, consts: dict, values: dict) -> tuple[list, dict]:
    """Equations with those of the programs that they call in their place.

    Args:
      consts: of variables; those of called programs are added.
      values: {variable of this program: that of the whole}, of its inputs.
    """
    equations = []
    read = lambda v: values.get(v, v) if _is_var(v) else v
    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        if equation.primitive.name in CALLS:
            called = equation.params["jaxpr"]
            names = {v: Var(v.aval) for v in called.jaxpr.constvars}
            consts.update(zip(names.values(), called.consts, strict=True))
            names |= zip(called.jaxpr.invars, inputs, strict=True)
            inner, names = _without_calls(called.jaxpr, consts, names)
            equations += inner
            found = [names.get(v, v) if _is_var(v) else v for v in called.jaxpr.outvars]
            values |= zip(equation.outvars, found, strict=True)
            continue
        new = [Var(v.aval) for v in equation.outvars]
        values |= zip(equation.outvars, new, strict=True)
        equations.append(equation.replace(invars=inputs, outvars=new))
    return equations, values


def features_of(model: Model) -> Callable[[PyTree, PyTree], jax.Array]:
    """Build (frozen leaves, x [B, ...]) -> features [B, D] of a frozen prefix."""
    variables = jax.eval_shape(model.init, jax.random.key(0))

    def embed(frozen, x):
        parts = cut(model, variables, x, True, jax.random.key(0)).prefix(frozen, x)
        size = len(jax.tree.leaves(x)[0])
        return jnp.concatenate([y.reshape(size, -1) for y in parts], 1)

    return embed


def on_features(model: Model) -> Model:
    """Let a model with frozen leaves also take features in place of its input."""

    def wrap(function):
        has_middle = function is model.apply_with_features

        def call(variables, x, train=False, key=None):
            if not (isinstance(x, Mapping) and x.keys() == {FEATURES}):
                return function(variables, x, train, key=key)
            outputs = _of_features(model, variables, x[FEATURES], train, key)
            return outputs if has_middle else (outputs[0], outputs[-1])

        return call

    return model.wrapped(wrap)


def _of_features(model, variables, features, train, key):
    """Outputs of a model from features [B, D] of its prefix."""
    x = input_structs(model.input_shape, len(features))
    parts = cut(model, variables, x, train, key)
    sizes = [math.prod(y.shape) // len(features) for y in parts.crossing]
    ends = np.cumsum(sizes)
    if ends[-1] != features.shape[1]:
        raise ValueError(
            f"features must be {ends[-1]} numbers of an example, got "
            f"{features.shape[1]}: they are of another model, or of training."
        )
    pieces = [
        features[:, end - size : end].astype(y.dtype).reshape(y.shape)
        for y, size, end in zip(parts.crossing, sizes, ends, strict=True)
    ]
    return parts.rest(pieces, variables, model.frozen.value, key)
