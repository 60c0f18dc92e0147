"""PyTorch's operators, ATen, as functions of JAX arrays: those of vision networks.

Names and arguments: native_functions.yaml of PyTorch 2.

  tensors        arrays whose axes lie in another order, and operators on them
  elementwise    functions of each number
  reductions     sums, extremes and softmax
  products       products of matrices, linear layers and attention
  convolutions   convolution
  pooling        pooling and resizing
  normalization  normalization
  randomness     dropout and other random numbers
  shapes         views, parts, joins, padding
"""

from fedfr_jax.models.aten import (
    convolutions,
    elementwise,
    normalization,
    pooling,
    products,
    randomness,
    reductions,
    shapes,
)

OPERATORS = (
    elementwise.OPERATORS
    | reductions.OPERATORS
    | products.OPERATORS
    | convolutions.OPERATORS
    | pooling.OPERATORS
    | normalization.OPERATORS
    | shapes.OPERATORS
)
RANDOM = randomness.OPERATORS | products.RANDOM  # get `draw`
NUMBERS = shapes.NUMBERS
