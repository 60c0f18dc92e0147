"""What keys of a config do to the step of `pretrained`: the program has it."""

import functools
import re

import jax
import numpy as np
import pytest

from fedfr_jax.convolutions import use_forms
from fedfr_jax.models import iresnet
from fedfr_jax.plan.aot import stage_programs
from tests.tasks.faces.given import experiment_of, partition_of, source_of

pytestmark = pytest.mark.ci

DEVICES, BATCH, CLASSES, DIM = 4, 16, 40, 6  # ten classes a device
NORMS = 7  # layers of batch normalization
CUT = {"class_parallel": True}


@functools.cache
def program(**pretrain):
    """The step of a tiny IResNet, as text."""
    return lowered("float32", **pretrain).as_text()


def lowered(dtype, **pretrain):
    """The step of a tiny IResNet that computes in `dtype`."""
    people = np.arange(CLASSES + 4, dtype=np.int32)
    labels = np.repeat(people, 5)
    images = np.zeros((len(labels), 8, 8, 3), np.uint8)
    who = {"public": people[2:-2], "unseen": people[-2:]}
    is_test = np.arange(len(labels)) % 5 == 4
    partition = partition_of(labels, is_test, [[0], [1]], **who)
    settings = {"pretrain": {"batch_size": BATCH, **pretrain}, "methods": {}}
    sizes = {"blocks": (1,), "widths": (4,), "embedding_dim": DIM, "dtype": dtype}
    network = iresnet((8, 8, 3), **sizes)
    given = network, source_of(images, labels), partition
    experiment = experiment_of(settings, *given, grid=(DEVICES, 1))
    # optax's schedules need the former; a convolution is seen where it is XLA's
    with jax.numpy_dtype_promotion("standard"), use_forms("xla"):
        return stage_programs(experiment, "pretrained")["step"]


@pytest.mark.parametrize(
    "key, before, pattern, more",
    [
        # Mean and variance of each layer, there and back.
        ({"sync_batch_norm": True}, {}, "stablehlo.all_reduce", 4 * NORMS),
        ({"sync_batch_norm": 2}, {}, r"= dense<\[\[0, 1\], \[2, 3\]\]>", 4 * NORMS),
        ({"gradient_accumulation_steps": 2}, {}, "stablehlo.while", 1),
        # The sum of the last layer's gradient.
        ({"reduce_dtype": "bfloat16"}, {}, r"}\) : \(tensor<64x6xbf16>\)", 1),
        ({"class_dtype": "bfloat16"}, CUT, "dot_general.*16x6xbf16.*6x10xbf16", 1),
        ({"class_chunk_size": 5}, CUT, "dot_general.*-> tensor<16x5xf32>", 2),
        # Three rows of ten are drawn, beside those of the batch's own classes.
        (
            {"class_sample_rate": (0.3, 1.0)},
            CUT,
            "dot_general.*-> tensor<16x19xf32>",
            1,
        ),
    ],
    ids=lambda x: next(iter(x), "") if isinstance(x, dict) else "",
)
def test_a_key_is_in_the_compiled_step(key, before, pattern, more):
    count = lambda **keys: len(re.findall(pattern, program(**keys)))
    assert count(**before, **key) - count(**before) == more


@pytest.mark.parametrize("settings", [{}, CUT], ids=["whole", "cut"])
def test_convolutions_in_bfloat16_leave_weights_and_losses_in_float32(settings):
    step = lowered("bfloat16", **settings)
    found = re.findall(r"stablehlo.convolution.*-> tensor<[^>]*x(\w+)>", step.as_text())
    assert set(found) == {"bf16"}
    floats = {x.dtype.name for x in jax.tree.leaves(step.out_info) if x.ndim}
    assert "bfloat16" not in floats and "float32" in floats
    loss = step.out_info[1]["loss"]
    assert loss.dtype == "float32"
