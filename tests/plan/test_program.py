"""What a program takes is what hand counts and the compiler say."""

import jax
import jax.numpy as jnp
import pytest

from fedfr_jax.plan.devices import DEVICES, REACHED, STREAMED, seconds
from fedfr_jax.plan.program_cost import program_cost, tiled

F32 = jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def of(function, *arguments, **known):
    return program_cost(jax.make_jaxpr(function)(*arguments).jaxpr, **known)


def test_a_convolution_network_has_its_hand_count_forward_and_backward():
    def logits(kernels, x):
        first, second, last = kernels
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        for kernel in (first, second):
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **numbers)
            x = jnp.maximum(y, 0)
        return x.reshape(len(x), -1) @ last

    kernels = [shape(3, 3, 1, 4), shape(5, 5, 4, 6), shape(8 * 8 * 6, 3)]
    images = shape(7, 8, 8, 1)
    first = 7 * 2 * 64 * 9 * 1 * 4
    second = 7 * 2 * 64 * 25 * 4 * 6
    last = 7 * 2 * 8 * 8 * 6 * 3
    assert of(logits, kernels, images).flops == first + second + last
    loss = lambda kernels, x: jnp.square(logits(kernels, x)).sum()
    # Gradients of kernels and inputs, but not of the images.
    expected = 2 * first + 3 * (second + last)
    assert of(jax.grad(loss), kernels, images).flops == expected


def test_the_backward_pass_of_a_stride_counts_no_zeros():
    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=numbers
        )
        return (y * y).sum()

    given = shape(3, 3, 4, 8), shape(2, 8, 8, 4)
    once = 2 * 2 * 4 * 4 * 8 * 9 * 4
    assert of(jax.grad(loss, (0, 1)), *given).flops == 3 * once


def test_products_are_what_the_compiler_counts_of_an_unrolled_network():
    def loss(layers, x):
        for kernel in layers:
            x = x @ kernel
        return x.sum()

    given = [shape(64, 96), shape(96, 32)], shape(16, 64)
    gradients = jax.value_and_grad(loss)
    told = jax.jit(gradients).lower(*given).cost_analysis()["flops"]
    assert of(gradients, *given).flops == pytest.approx(told, rel=0.02)


def test_a_loop_of_local_steps_has_as_many_turns_as_they_are():
    def steps(count, x):
        return jax.lax.fori_loop(0, count, lambda i, x: x @ x, x)

    given = shape(dtype=jnp.int32), shape(4, 4)
    cost = of(steps, *given, loop_turns=6.5)
    assert cost.flops == 6.5 * 2 * 64
    assert {x.times for x in cost.kernels} == {6.5}

    def scanned(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]

    assert of(scanned, given[1], loop_turns=6.5).flops == 5 * 2 * 64


def test_only_what_cannot_be_fused_takes_memory():
    x = shape(256, 256)
    fused = of(lambda x: (jnp.tanh(x) * 2 + 1).sum(), x)
    assert fused.peak < 1024 and len(fused.kernels) == 1
    assert fused.kernels[0].moved == pytest.approx(256 * 256 * 4, rel=0.01)
    # tanh(x) is an operand of both products, the first result one of the second.
    chain = of(lambda x: jnp.tanh(x) @ jnp.tanh(x) @ jnp.tanh(x), x)
    assert 3 * 256 * 256 * 4 <= chain.peak <= 4 * 256 * 256 * 4


def test_residuals_wait_for_the_backward_pass_unless_they_are_computed_again():
    def loss(layers, x, remat):
        layer = lambda x, kernel: jnp.tanh(x @ kernel)
        layer = jax.checkpoint(layer) if remat else layer
        x = jax.lax.scan(lambda x, k: (layer(x, k), None), x, layers)[0]
        return x.sum()

    given = shape(16, 32, 32), shape(4096, 32)
    kept, again = (
        of(jax.grad(lambda k, x, r=r: loss(k, x, r)), *given) for r in (False, True)
    )
    size = 4096 * 32 * 4
    assert kept.peak > 16 * size
    assert again.flops == pytest.approx(kept.flops * 4 / 3, rel=0.1)


def test_seconds_are_the_longest_of_operations_bytes_and_launch():
    v100 = DEVICES["v100"]
    big = of(lambda x: x @ x, shape(4096, 4096, dtype=jnp.bfloat16))
    product = 2 * 4096**3 / (REACHED * v100.bfloat16)
    assert seconds(big.kernels, v100) == pytest.approx(product)
    moved = of(lambda x: x.sum(), shape(2**28))
    streamed = 2**30 / (STREAMED * v100.bandwidth)
    assert seconds(moved.kernels, v100) == pytest.approx(streamed, rel=0.01)
    small = of(lambda x: x @ x, shape(4, 4))
    assert seconds(small.kernels, v100) == v100.launch
    assert seconds(small.kernels, v100, side_by_side=8) == v100.launch


def test_a_tpu_stores_whole_tiles():
    alone, many = tiled(1), tiled(64)
    images = (20, 26, 26, 32)  # 20 in 24 rows, 32 channels in 128, or four lanes'
    assert alone(images, 4) == pytest.approx(4 * 1.2)
    assert many(images, 4) == tiled(4)(images, 4) == pytest.approx(1.2)
    assert tiled(3)(images, 4) == pytest.approx(4 / 3 * 1.2)  # 96 of 128
    assert alone((20, 8, 128), 2) == pytest.approx(1.6)  # 16 rows of two bytes
    assert alone((128, 16, 16, 64), 4) == 1  # images along the 128
    assert alone((24, 5, 256), 4) == alone((7,), 4) == alone((), 4) == 1
    double = lambda x: jnp.sort(2 * x)
    plain, padded = (of(double, shape(20, 32), **k) for k in ({}, {"padding": alone}))
    assert padded.peak == pytest.approx(4.8 * plain.peak) and plain.peak > 0
    assert padded.kernels == plain.kernels
