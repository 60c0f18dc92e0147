"""FLOPs of a program, counted from its jaxpr without compiling.

Twice the multiply-adds of convolutions and matrix products, zeros of the padding
included, as papers on networks count them; what is done element by element is left out.
A scan counts its body as often as it runs, a while loop once, a conditional its longest
branch.
"""

import math
from collections.abc import Callable, Mapping

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from fedfr_jax.types import InputShape, PyTree, input_structs

PASSES = 3  # of training: forward, and backward for inputs and for parameters


def count_flops(function: Callable, *arguments: PyTree) -> int:
    """Count the FLOPs of `function(*arguments)`, for arrays or ShapeDtypeStructs."""
    return program_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def network_flops(
    count: Callable[[], int] | None,
    apply: Callable,
    variables: PyTree,
    input_shape: InputShape,
) -> int:
    """FLOPs of a model on one image: by the model's own count, else by tracing it.

    Args:
      apply: (variables, a batch of inputs) -> output.
      variables: shapes.
    """
    if count is not None:
        return count()
    return count_flops(apply, variables, input_structs(input_shape))


def forward_flops(network: int, rows: int = 0) -> int:
    """FLOPs of a forward pass on one image, with 2 per class-matrix entry."""
    return network + 2 * rows


def program_flops(program: Jaxpr, loop_turns: int = 1) -> int:
    """FLOPs of a program whose while loops, not nested, run `loop_turns` times."""
    return sum(_equation_flops(equation, loop_turns) for equation in program.eqns)


def count_flops_of_jaxpr(equation: JaxprEqn) -> int:
    """FLOPs of one equation; 0 if it is neither a convolution nor a matrix product."""
    name = equation.primitive.name
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    return _product_flops(equation) if name == "dot_general" else 0


def _equation_flops(equation: JaxprEqn, loop_turns: int) -> int:
    name = equation.primitive.name
    inner = 1 if name == "while" else loop_turns
    bodies = [program_flops(x, inner) for x in jaxprs_in_params(equation.params)]
    if name == "scan":
        return equation.params["length"] * sum(bodies)
    if name == "while":
        return loop_turns * sum(bodies)
    return (
        max(bodies) if name == "cond" else count_flops_of_jaxpr(equation) + sum(bodies)
    )


def scan_sizes(params: Mapping) -> tuple[int, int]:
    """(number of constants, number of carried values) among a `scan`'s arguments."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def _convolution_flops(equation):
    """FLOPs of a convolution, without products with the zeros of a dilated input."""
    _, kernel = (variable.aval for variable in equation.invars)
    features_axis = equation.params["dimension_numbers"].rhs_spec[0]
    terms = kernel.size // kernel.shape[features_axis]
    dilation = math.prod(equation.params["lhs_dilation"])
    return 2 * equation.outvars[0].aval.size * terms // dilation


def _product_flops(equation):
    left = equation.invars[0].aval
    (summed, _), _ = equation.params["dimension_numbers"]
    terms = math.prod(left.shape[axis] for axis in summed)
    return 2 * equation.outvars[0].aval.size * terms
