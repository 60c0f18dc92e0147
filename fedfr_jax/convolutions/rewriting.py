"""Functions whose operations are computed in another way, wherever they come from.

A function is traced to a jaxpr, and that is evaluated with rules in place of some of
its operations, also within jit, scan, while, cond, remat, shard_map and functions with
derivatives of their own. It can then be differentiated, batched and compiled as before.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
    primitives,
)

# Operation -> (*inputs, **its parameters) -> output, or None: it stays as it is.
Rules = Mapping[Primitive, Callable[..., Any]]


def rewritten(function: Callable, rules: Callable[[], Rules]) -> Callable:
    """Function with `rules()`, asked for when it is called, in place of operations."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def of_arrays(*arrays):
            new = dict(zip(where, arrays, strict=True))
            found = [new.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, found)
            return function(*args, **kwargs)

        arrays = [leaves[i] for i in where]
        program, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        outputs = evaluate(rules(), program.jaxpr, program.consts, arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def evaluate(rules: Rules, jaxpr: Jaxpr, consts: Sequence, inputs: Sequence) -> list:
    """Outputs of a program; neighboring operations without a rule at once."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    has_rule = functools.partial(_has_rule, rules)
    for is_changed, equations in itertools.groupby(jaxpr.eqns, has_rule):
        if not is_changed:
            _keep(jaxpr, [*equations], values)
            continue
        for equation in equations:
            arrays = [read(x) for x in equation.invars]
            with jax.named_scope(str(equation.source_info.name_stack)):
                outputs = _apply(rules, jaxpr, equation, arrays)
            values |= zip(equation.outvars, outputs, strict=True)
    return [read(x) for x in jaxpr.outvars]


def _has_rule(rules: Rules, equation: JaxprEqn) -> bool:
    """Whether an equation, or one within it, has a rule."""
    inner = (x for jaxpr in jaxprs_in_params(equation.params) for x in jaxpr.eqns)
    return equation.primitive in rules or any(_has_rule(rules, x) for x in inner)


def _keep(jaxpr: Jaxpr, equations: list[JaxprEqn], values: dict) -> None:
    """Add the outputs of equations of `jaxpr`, computed as they are, to `values`."""
    read = [x for equation in equations for x in equation.invars]
    made = [x for equation in equations for x in equation.outvars]
    read = [x for x in read if not isinstance(x, Literal) and x in values]
    inputs = {x: values[x] for x in read}
    outputs = [x for x in made if not isinstance(x, DropVar)]
    run = _function(jaxpr, equations, [*inputs], outputs)
    values |= zip(outputs, run(*inputs.values()), strict=True)


def _function(jaxpr, equations, inputs, outputs):
    """Function of variables of `jaxpr` that evaluates some of its equations."""
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[], invars=inputs, outvars=outputs, eqns=equations, debug_info=names
    )
    return jaxpr_as_fun(ClosedJaxpr(part, ()))


def _apply(rules, jaxpr, equation, inputs):
    """Outputs of an equation that has a rule, or some within it."""
    primitive, params = equation.primitive, equation.params
    if primitive in rules:
        output = rules[primitive](*inputs, **params)
        return as_function(jaxpr, equation)(*inputs) if output is None else [output]
    if primitive.name in STRUCTURES:
        return STRUCTURES[primitive.name](rules, jaxpr, equation, inputs)
    params = {k: _with_rules(rules, x) for k, x in params.items()}
    return as_function(jaxpr, equation.replace(params=params))(*inputs)


def as_function(jaxpr: Jaxpr, equation: Any) -> Callable:
    """Function of an equation's inputs that evaluates it."""
    inputs = [Var(x.aval) for x in equation.invars]
    outputs = [Var(x.aval) for x in equation.outvars]
    equation = equation.replace(invars=inputs, outvars=outputs)
    return _function(jaxpr, [equation], inputs, outputs)


def _with_rules(rules, value):
    """A parameter of an equation, its closed jaxprs rewritten."""
    if type(value) is tuple:
        return tuple(_with_rules(rules, x) for x in value)
    if not isinstance(value, ClosedJaxpr):
        return value
    run = _within(rules, value.jaxpr, value.consts)
    return jax.make_jaxpr(run)(*value.in_avals)


def _within(rules, jaxpr, consts=()):
    return lambda *inputs: evaluate(rules, jaxpr, consts, inputs)


def _remat(rules, jaxpr, equation, inputs):
    del jaxpr
    params = equation.params
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(_within(rules, params["jaxpr"]), **options)(*inputs)


def _shard_map(rules, jaxpr, equation, inputs):
    del jaxpr
    params = equation.params
    options = {name: params[name] for name in ("mesh", "out_specs", "check_vma")}
    run = _within(rules, params["jaxpr"])
    return jax.shard_map(
        lambda *inputs: tuple(run(*inputs)),
        in_specs=tuple(params["in_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        **options,
    )(*inputs)


def _custom_jvp(rules, jaxpr, equation, inputs):
    """A function whose tangents stay as they are: a rule's may have no transpose."""
    as_it_is, program = as_function(jaxpr, equation), equation.params["call_jaxpr"]
    function = jax.custom_jvp(_within(rules, program.jaxpr, program.consts))
    function.defjvp(functools.partial(jax.jvp, as_it_is))
    return function(*inputs)


def _custom_vjp(rules, jaxpr, equation, inputs):
    """A function whose derivative is rewritten too; constants, which have none, are
    closed over.
    """
    as_it_is, program = as_function(jaxpr, equation), equation.params["call_jaxpr"]
    num_consts = equation.params["num_consts"]
    consts, inputs = inputs[:num_consts], inputs[num_consts:]
    again = lambda: rules

    def value(*inputs):
        return evaluate(rules, program.jaxpr, program.consts, (*consts, *inputs))

    def forward(*inputs):
        return jax.vjp(lambda *x: as_it_is(*consts, *x), *inputs)

    def backward(pull, cotangents):
        none_of_int = lambda x: None if x.dtype == jax.dtypes.float0 else x
        return tuple(none_of_int(x) for x in pull(cotangents))

    function = jax.custom_vjp(value)
    function.defvjp(rewritten(forward, again), rewritten(backward, again))
    return function(*inputs)


# Names of operations that are written again by JAX's public functions.
STRUCTURES = {
    primitives.remat_p.name: _remat,
    primitives.custom_jvp_call_p.name: _custom_jvp,
    primitives.custom_vjp_call_p.name: _custom_vjp,
    "shard_map": _shard_map,
}
