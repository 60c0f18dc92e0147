"""Convolutions and pooling of any function, computed as the platform does it fastest.

`fast` rewrites a function as it is traced, whichever library its layers come from:
flax, equinox, haiku or `jax.lax`. `FORMS` is the choice: what computes an operation on
which platform, by the devices that a program is traced for (`mesh.platform`), so that a
round can be compiled for devices that this machine does not have. Operations that it
does not name are XLA's own. `value_and_grad` is that of a client which may be one of
several lanes. `use_forms("xla")` turns all of it off.

  forms         the choice
  rewriting     evaluates a traced function with other computations of some operations
  conv          convolution on a CPU: which way, and those of groups and dilation
  patches       convolution as one product of patches that reach over several pixels
  winograd      3x3 convolution with fewer products
  pooling       pooling by slices
  lane_kernels  convolution on a GPU, with gradients for several lanes
  own_images    convolution of a batch that is cut over several devices
  side_by_side  gradients of several lanes whose channels share an axis, on a TPU
"""

from fedfr_jax.convolutions.forms import FORMS, fast, use_forms, value_and_grad

__all__ = ["FORMS", "fast", "use_forms", "value_and_grad"]
