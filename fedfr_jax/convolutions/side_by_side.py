"""Gradients of several lanes whose channels lie side by side, for a TPU.

A TPU stores and multiplies 128 channels at a time; 32 take the room of 128, and its
convolution of per-lane kernels the time. So the loss of G lanes is evaluated with their
channels in one axis, [..., G C] in place of [G, ..., C], from the first convolution to
the first operation that mixes channels: a convolution has one kernel whose blocks on
the diagonal are the lanes' (products with 0 cost nothing where the unit was not full),
and operations on each number, pooling and sums over pixels are the same. All others are
vmapped. 64 lanes of the EMNIST-CNN take half the cycles, see
docs/explanation/accelerators.md.

A lane whose numbers overflow is NaN from its next convolution on, and does not spoil
its neighbors: 0 times infinity would.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params, primitives

from fedfr_jax.convolutions import own_images
from fedfr_jax.convolutions.rewriting import Rules, as_function, evaluate
from fedfr_jax.types import PyTree

FULL = 128  # channels that a TPU stores and multiplies at a time
MAX_LANES = 16  # of a group; more zeros than that have a cost

NHWC = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
ELEMENTWISE = set(
    "abs add add_any and clamp convert_element_type copy cos div eq erf exp exp2 expm1 "
    "ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or "
    "pow reduce_precision rsqrt select_n sign sin sqrt square stop_gradient sub tanh "
    "xor".split()
)
RULES: Rules = {primitives.conv_general_dilated_p: own_images.convolve}
INLINED = ("jit", "pjit", "closed_call", "core_call")


def value_and_grad(loss_of: Callable) -> Callable:
    """`jax.value_and_grad(loss_of, has_aux=True)`, of lanes side by side under vmap.

    Args:
      loss_of: params -> (loss [], auxiliary results); it may use other arrays.
    """

    def run(params: PyTree):
        leaves, structure = jax.tree.flatten(params)

        def of_leaves(*leaves):
            return loss_of(jax.tree.unflatten(structure, leaves))

        program, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        outputs, grads = _gradients(program.jaxpr)(program.consts, leaves)
        loss_and_aux = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return loss_and_aux, jax.tree.unflatten(structure, grads)

    return run


def _gradients(jaxpr: Jaxpr) -> Callable:
    """(consts, arrays) -> (outputs, gradients of the first one by the arrays)."""

    @custom_vmap
    def gradients(consts, arrays):
        def outputs(arrays):
            found = evaluate(RULES, jaxpr, consts, arrays)
            return found[0], found

        grads, found = jax.grad(outputs, has_aux=True)(arrays)
        return found, grads

    @gradients.def_vmap
    def of_lanes(num_lanes, is_batched, consts, arrays):
        of_consts, of_arrays = is_batched
        arrays = [
            x if batched else jnp.broadcast_to(x, (num_lanes, *jnp.shape(x)))
            for x, batched in zip(arrays, of_arrays, strict=True)
        ]
        group = Group(num_lanes, group_size(jaxpr, num_lanes))

        def outputs(arrays):
            found = _evaluate_lanes(group, jaxpr, of_consts, consts, arrays)
            return found[0].sum(), found

        if group.size > 1 and _pays(jaxpr, outputs, arrays):
            grads, found = jax.grad(outputs, has_aux=True)(arrays)
            results = found, grads
        else:
            axes = [0 if batched else None for batched in of_consts]
            results = jax.vmap(gradients.fun, (axes, 0))(consts, arrays)
        return results, jax.tree.map(lambda _: True, results)

    return gradients


class Group(NamedTuple):
    """L lanes in N groups of G."""

    lanes: int
    size: int

    @property
    def number(self) -> int:
        """N."""
        return self.lanes // self.size


def group_size(jaxpr: Jaxpr, num_lanes: int) -> int:
    """Lanes of a group: a divisor of their number; 1 without a narrow convolution."""
    widths = [x.outvars[0].aval.shape[-1] for x in _convolutions(jaxpr)]
    most = min(FULL // min(widths, default=FULL), MAX_LANES)
    return max((n for n in range(1, most + 1) if num_lanes % n == 0), default=1)


def _convolutions(jaxpr):
    """Convolutions that lanes can share."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in INLINED:
            yield from _convolutions(equation.params["jaxpr"].jaxpr)
        elif equation.primitive.name == "conv_general_dilated" and _is_narrow(equation):
            yield equation


def _is_narrow(equation):
    params = equation.params
    groups = params["feature_group_count"], params["batch_group_count"]
    is_plain = params["dimension_numbers"] == NHWC and groups == (1, 1)
    return is_plain and 2 * equation.outvars[0].aval.shape[-1] <= FULL


def _evaluate_lanes(group, jaxpr, of_consts, consts, arrays):
    """Outputs [L, ...] of all lanes; of the constants some are shared."""
    consts = [
        Lanes(group, front=lambda x=x: x) if batched else x
        for x, batched in zip(consts, of_consts, strict=True)
    ]
    inputs = [Lanes(group, front=lambda x=x: x) for x in arrays]
    return [_front(group, x) for x in _together(group, jaxpr, consts, inputs)]


def _pays(jaxpr, outputs, arrays) -> bool:
    """Whether images change their form at most once for each convolution.

    A normalization that mixes channels, say, would have them back in front of it.
    """
    program = jax.make_jaxpr(outputs)(arrays)
    return _count_moves(program.jaxpr) <= len([*_convolutions(jaxpr)])


def _count_moves(jaxpr):
    """Changes of the form of images, [L, B, H, W, C] in front."""
    inner = sum(_count_moves(x) for e in jaxpr.eqns for x in jaxprs_in_params(e.params))
    moves = [e for e in jaxpr.eqns if e.params.get("name") in MOVES]
    return inner + sum(
        max(x.aval.ndim for x in (*e.invars, *e.outvars)) > 4 for e in moves
    )


class Lanes:
    """An array of each lane, in either form; what is not asked for is not computed."""

    def __init__(self, group: Group, *, front=None, beside=None, is_beside=False):
        self.group, self.is_beside = group, is_beside
        self._front, self._beside = front, beside

    @functools.cached_property
    def front(self) -> jax.Array:
        """[L, ..., C]."""
        return self._front() if self._front else _to_front(self.group, self.beside)

    @functools.cached_property
    def beside(self) -> jax.Array:
        """[N, ..., G C]."""
        return self._beside() if self._beside else _to_beside(self.group, self.front)


@functools.partial(jax.jit, static_argnums=0)
def _to_front(group, x):
    """[N, ..., G C] -> [L, ..., C]."""
    lead, channels = x.shape[1:-1], x.shape[-1] // group.size
    first, *others = lead or (1,)
    # Pixels as one axis: as two, a TPU's compiler pads what it writes.
    x = x.reshape(len(x), first, math.prod(others), group.size, channels)
    return jnp.moveaxis(x, 3, 1).reshape(group.lanes, *lead, channels)


@functools.partial(jax.jit, static_argnums=0)
def _to_beside(group, x):
    """[L, ..., C] -> [N, ..., G C]."""
    x = jnp.moveaxis(x.reshape(-1, group.size, *x.shape[1:]), 1, -2)
    return x.reshape(*x.shape[:-2], -1)


MOVES = ("_to_front", "_to_beside")  # names of their calls in a program


def _front(group, x):
    if isinstance(x, Lanes):
        return x.front
    return jnp.broadcast_to(x, (group.lanes, *jnp.shape(x)))


def _together(group: Group, jaxpr: Jaxpr, consts: Sequence, inputs: Sequence) -> list:
    """Outputs of a program whose values are `Lanes`, or arrays that lanes share."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    for equation in jaxpr.eqns:
        arrays = [read(x) for x in equation.invars]
        outputs = _apply(group, jaxpr, equation, arrays)
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(x) for x in jaxpr.outvars]


def _apply(group, jaxpr, equation, inputs):
    """Outputs of an equation, in the form that suits its inputs."""
    name, params = equation.primitive.name, equation.params
    alone = as_function(jaxpr, equation)
    if equation.primitive in RULES:
        alone = lambda *inputs: [RULES[equation.primitive](*inputs, **params)]
    if not any(isinstance(x, Lanes) for x in inputs):
        if name == "broadcast_in_dim" and not jnp.ndim(inputs[0]) and params["shape"]:
            return [_of_scalar(group, inputs[0], params["shape"])]
        return alone(*inputs)
    if name in INLINED:
        program = params["jaxpr"]
        return _together(group, program.jaxpr, program.consts, inputs)
    if name == "conv_general_dilated" and _is_narrow(equation):
        if all(isinstance(x, Lanes) for x in inputs):
            return [_lie_beside(group, _convolve(params, group, *inputs))]
    if any(_is_beside(x) for x in inputs):
        if name in OWN_DERIVATIVE and _is_of_floats(equation):
            return OWN_DERIVATIVE[name](group, alone, equation, inputs)
        if _is_elementwise(equation):
            wide = [_widen(group, x, equation.outvars[0].aval) for x in inputs]
            return [_lie_beside(group, equation.primitive.bind(*wide, **params))]
    axes = [0 if isinstance(x, Lanes) else None for x in inputs]

    @functools.cache
    def fronts():
        arrays = [x.front if isinstance(x, Lanes) else x for x in inputs]
        return jax.vmap(alone, axes)(*arrays)

    x, *shared = inputs
    wide = _widened(group.size, equation)
    if wide and not any(isinstance(y, Lanes) for y in shared):
        run = lambda x: equation.primitive.bind(x, *shared, **wide)
        if x.is_beside:
            return [_lie_beside(group, jax.vmap(run)(x.beside))]
        beside, front = lambda: jax.vmap(run)(x.beside), lambda: fronts()[0]
        return [Lanes(group, front=front, beside=beside)]
    return [
        Lanes(group, front=lambda i=i: fronts()[i])
        for i, _ in enumerate(equation.outvars)
    ]


def _is_beside(x):
    return isinstance(x, Lanes) and x.is_beside


def _of_scalar(group, x, shape):
    """A number that all lanes share, as an array of each."""
    front = lambda: jnp.broadcast_to(x, (group.lanes, *shape))
    wide = group.number, *shape[:-1], group.size * shape[-1]
    return Lanes(group, front=front, beside=lambda: jnp.broadcast_to(x, wide))


def _lie_beside(group, x):
    return Lanes(group, beside=lambda: x, is_beside=True)


def _is_elementwise(equation: Any) -> bool:
    """Whether no channel meets another one; axes of one element are repeated."""
    shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
    channels = {shape[-1] for shape in shapes if shape}
    return len(channels) == 1 and equation.primitive.name in ELEMENTWISE


def _is_of_floats(equation):
    numbers = (x.aval.dtype for x in (*equation.invars, *equation.outvars))
    return all(jnp.issubdtype(x, jnp.floating) for x in numbers)


def _widen(group, x, aval):
    """x as [N, ..., G C], of lanes or shared; shared scalars stay scalars.

    Args:
      aval: [..., C] of an operation's result.
    """
    if not isinstance(x, Lanes):
        if not jnp.ndim(x):
            return x
        wide = jnp.concatenate([x] * group.size, -1)
        return jnp.broadcast_to(wide, (group.number, *wide.shape))
    if x.is_beside or x.front.ndim > 1:
        return x.beside
    of_channels = jnp.repeat(x.front, aval.shape[-1])
    return of_channels.reshape(group.number, *(1,) * (aval.ndim - 1), -1)


def _arrays(group: Group, values: Sequence, variables: Sequence) -> list:
    """Arrays of all lanes, side by side; scalars in front."""
    return [
        _widen(group, x, v.aval) if v.aval.shape else _front(group, x)
        for x, v in zip(values, variables, strict=True)
    ]


def _lanes(group: Group, arrays: Sequence, variables: Sequence) -> list[Lanes]:
    """The values whose `_arrays` these are."""

    def build(x, variable):
        if variable.aval.shape:
            return _lie_beside(group, x)
        return Lanes(group, front=lambda: x)

    return [build(*pair) for pair in zip(arrays, variables, strict=True)]


def _custom_jvp(group, alone, equation, inputs):
    """A function with a derivative of its own, both evaluated for all lanes."""
    variables = equation.invars
    structs = [x.aval for x in variables]
    value = jax.custom_jvp(_value(group, equation))

    @value.defjvp
    def tangents(primals, tangents):
        derivative = jax.make_jaxpr(lambda p, t: jax.jvp(alone, p, t))(structs, structs)
        inputs = _lanes(group, (*primals, *tangents), [*variables, *variables])
        outputs = _together(group, derivative.jaxpr, derivative.consts, inputs)
        outputs = _arrays(group, outputs, derivative.jaxpr.outvars)
        return outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]

    outputs = value(*_arrays(group, inputs, variables))
    return _lanes(group, outputs, equation.outvars)


def _custom_vjp(group, alone, equation, inputs):
    """As `_custom_jvp`, with the derivative in reverse mode."""
    variables, ends = equation.invars, equation.outvars
    structs = [x.aval for x in variables]
    value = jax.custom_vjp(_value(group, equation))

    @functools.cache  # not before it is needed: it may call the function itself
    def traced():
        run = lambda *inputs: jax.vjp(alone, *inputs)
        program, (shapes, pull) = jax.make_jaxpr(run, return_shape=True)(*structs)
        derivative = jax.make_jaxpr(lambda pull, dy: pull(dy))(pull, shapes)
        return program, program.jaxpr.outvars[len(ends) :], derivative

    def forward(*arrays):
        program, saved, _ = traced()
        inputs = _lanes(group, arrays, variables)
        found = _together(group, program.jaxpr, program.consts, inputs)
        outputs = _arrays(group, found[: len(ends)], ends)
        return outputs, _arrays(group, found[len(ends) :], saved)

    def backward(arrays, cotangents):
        _, saved, derivative = traced()
        inputs = _lanes(group, arrays, saved) + _lanes(group, cotangents, ends)
        found = _together(group, derivative.jaxpr, derivative.consts, inputs)
        return tuple(_arrays(group, found, variables))

    value.defvjp(forward, backward)
    return _lanes(group, value(*_arrays(group, inputs, variables)), ends)


def _value(group, equation):
    """A function with a derivative of its own, of arrays of all lanes, without it."""
    program = equation.params["call_jaxpr"]

    def value(*arrays):
        inputs = _lanes(group, arrays, equation.invars)
        outputs = _together(group, program.jaxpr, program.consts, inputs)
        return _arrays(group, outputs, equation.outvars)

    return value


OWN_DERIVATIVE = {"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp}


def _widened(size, equation):
    """Parameters of an operation on [..., G C]; None if it mixes channels."""
    name, params = equation.primitive.name, equation.params
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if not before or not after or before[-1] != after[-1]:
        return None
    last, wide = len(before) - 1, (*after[:-1], size * after[-1])
    if name == "broadcast_in_dim" and len(equation.invars) == 1:
        is_last = params["broadcast_dimensions"][-1] == len(after) - 1
        return {**params, "shape": wide} if is_last else None
    if name == "reshape" and params["dimensions"] is None:
        return {**params, "new_sizes": wide}
    if name == "squeeze":
        return None if last in params["dimensions"] else params
    if name in ("reduce_sum", "reduce_max", "reduce_min"):
        return None if last in params["axes"] else params
    if name.startswith("reduce_window_"):
        is_alone = params["window_dimensions"][-1] == params["window_strides"][-1] == 1
        return params if is_alone and params["padding"][-1] == (0, 0) else None
    if name == "pad":
        return params if params["padding_config"][-1] == (0, 0, 0) else None
    return None


def _convolve(params, group, x, kernels):
    """Convolve images with kernels of the same lanes: -> [N, B, H', W', G O]."""
    kernels = kernels.front.reshape(group.number, group.size, *kernels.front.shape[1:])
    convolve = functools.partial(_convolve_group, params, group.size)
    return jax.vmap(convolve)(x.beside, kernels)


def _convolve_group(params, size, x, kernels):
    """Convolve x [B, H, W, G I] with kernels [G, kh, kw, I, O]: -> [B, H', W', G O]."""

    def dense(x, kernels):
        width = kernels.shape[-1]
        sides = [(i * width, (size - 1 - i) * width) for i in range(size)]
        rows = [
            jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), pad))
            for kernel, pad in zip(kernels, sides, strict=True)
        ]
        blocks = jnp.concatenate(rows, axis=2)
        return own_images.convolve(x, blocks, **params)

    @jax.custom_vjp
    def convolve(x, kernels):
        return forward(x, kernels)[0]

    def forward(x, kernels):
        finite = _finite(x), _finite(kernels)
        y = dense(*finite)
        is_sound = _is_finite(x, size) & jnp.isfinite(kernels).all((1, 2, 3, 4))
        is_sound = jnp.repeat(is_sound, kernels.shape[-1])
        return jnp.where(is_sound, y, jnp.nan), finite

    def backward(finite, dy):
        return jax.vjp(dense, *finite)[1](_finite(dy))

    convolve.defvjp(forward, backward)
    return convolve(x, kernels)


def _is_finite(x, size):
    """Whether each of the lanes [G] in x [..., G C] has finite numbers only."""
    channels = jnp.isfinite(x).all(tuple(range(x.ndim - 1)))
    return channels.reshape(size, -1).all(1)


def _finite(x):
    """x with a number near the largest in place of those that are not finite.

    Times the zeros of other lanes it is 0.
    """
    largest = float(min(jnp.finfo(x.dtype).max, jnp.finfo(jnp.bfloat16).max))
    return jnp.where(jnp.abs(x) <= largest, x, jnp.asarray(largest, x.dtype))
