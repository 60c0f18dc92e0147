"""Networks have the published sizes, and start as they say."""

import functools
import math

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.trees import by_name
from tests.models.made import count_of

pytestmark = pytest.mark.ci

FACE, PHOTOGRAPH = (112, 112, 3), (224, 224, 3)
CLASSIFIER = {"stem": "imagenet", "num_classes": 1000}
SEPARABLE = 9 * 512 + 512 * 512 + 4 * 512  # a MobileNet's block that keeps 512 channels
PUBLISHED = [  # name, settings, input shape, parameters, billions of multiply-adds
    ("sphereface", {"depth": 64}, FACE, 49_726_656, None),
    # The paper says 0.99 million parameters, without those of BN and PReLU, and
    # 221 million multiply-adds.
    ("mobilefacenet", {}, FACE, 1_003_136, 0.221),
    # insightface's table says 1.5, 5.7, 11.4 and 25.3 billion.
    ("vit", {"size": "T"}, FACE, 19_137_536, 1.505),
    ("vit", {"size": "S"}, FACE, 76_022_784, 5.747),
    ("vit", {"size": "B"}, FACE, 113_832_960, 11.437),
    ("vit", {"size": "L"}, FACE, 255_683_584, 25.338),
    ("resnet", {"depth": 18, **CLASSIFIER}, PHOTOGRAPH, 11_689_512, 1.814),
    ("resnet", {"depth": 34, **CLASSIFIER}, PHOTOGRAPH, 21_797_672, 3.664),
    ("resnet", {"depth": 50, **CLASSIFIER}, PHOTOGRAPH, 25_557_032, 4.089),
    ("resnet", {"depth": 101, **CLASSIFIER}, PHOTOGRAPH, 44_549_160, None),
    ("resnet", {"depth": 152, **CLASSIFIER}, PHOTOGRAPH, 60_192_808, None),
    # Keras counts 4,253,864 with 21,888 running statistics; the paper 569 million.
    ("mobilenet", CLASSIFIER, PHOTOGRAPH, 4_231_976, 0.569),
    (
        "mobilenet",
        {"num_blocks": 11, **CLASSIFIER},
        PHOTOGRAPH,
        4_231_976 - 2 * SEPARABLE,
        None,
    ),
    # Without its stride, maps of 32 pixels are those of 224 divided by 3.5.
    (
        "mobilenet",
        {"num_classes": 10},
        (32, 32, 3),
        4_231_976 - 990 * 1025,
        round((568_740_352 - 1_024_000) * 32**2 / 112**2 / 1e9, 3),
    ),
    (
        "leaf_celeba",
        {},
        (84, 84, 3),
        9 * (3 + 3 * 32) * 32 + 4 * 32 + 4 * 2 * 32 + (5 * 5 * 32 + 1) * 2,
        None,
    ),
    (
        "leaf_femnist",
        {},
        (28, 28, 1),
        832 + 51264 + (7 * 7 * 64 + 1) * 2048 + 2049 * 62,
        None,
    ),
]
IRESNETS = {  # depth: (parameters, billions of multiply-adds)
    50: (43_590_848, 6.309),
    100: (65_156_160, 12.090),
    18: (24_025_600, 2.610),
    34: (34_139_328, 4.460),
    120: (76_970_560, 14.402),
    140: (87_013_696, 16.714),
    200: (118_833_920, 23.419),
    240: (137_229_376, 28.274),
    600: (306_490_816, 69.199),
    1200: (654_429_376, 139.024),
    2060: (1_122_301_120, 238.908),
}
for depth, (count, billions) in IRESNETS.items():
    # The official counts include the 512 frozen scales of the last BN.
    row = "iresnet", {"depth": depth}, FACE, count - 512, billions
    marks = () if depth in (50, 100) else pytest.mark.slow
    PUBLISHED.append(pytest.param(*row, marks=marks))


@pytest.mark.parametrize("name, settings, shape, count, billions", PUBLISHED)
def test_networks_have_the_published_sizes(name, settings, shape, count, billions):
    model = MODELS[name](shape, **settings)
    assert count_of(model) == count
    assert billions in (None, round(model.flops / 2e9, 3))


def test_other_heads_and_shortcuts_have_the_parameters_that_they_say():
    def size(**settings):
        return count_of(MODELS["iresnet"](FACE, blocks=(1, 1, 1, 1), **settings))

    plain, pixels, dim = size(), 7 * 7 * 512, 512
    assert size(stride_on="first") == plain
    # The first block of stage 1: a convolution of 64 to 64 channels and its BN.
    assert plain - size(shortcut="pool") == 64 * 64 + 2 * 64
    assert plain - size(head="F") == dim  # the bias of the last BN
    expert, gate = pixels * dim + dim + 2 * 512, pixels * 2 + 2 + 2 * 512
    assert size(head="moe") - plain == expert + gate - dim
    assert plain - size(head="GAP") == 48 * 512 * dim
    assert plain - size(head="GDC") == 48 * 512 * dim - pixels


STAGES = {"widths": (16, 32), "blocks": (1, 3)}
FIRST_VALUES = [  # name, settings, leaf, its shape, standard deviation (0: zeros)
    ("sphereface", STAGES, "stage2/block3/conv2/kernel", (3, 3, 32, 32), 0.01),
    (
        "sphereface",
        STAGES,
        "stage2/block1/conv/kernel",
        (3, 3, 16, 32),
        math.sqrt(2 / (9 * 16 + 9 * 32)),
    ),
    ("sphereface", STAGES, "stage2/block1/conv/bias", (32,), 0),
    ("iresnet", STAGES, "stage2/block2/conv1/kernel", (3, 3, 32, 32), 0.1),
    (
        "resnet",
        {"blocks": (1, 1), "widths": (32, 64), "num_classes": 100},
        "stage2/block1/conv1/kernel",
        (3, 3, 32, 64),
        math.sqrt(2 / (9 * 64)),
    ),
    (
        "resnet",
        {"blocks": (1, 1), "widths": (32, 64), "num_classes": 100},
        "fc/kernel",
        (64, 100),
        1 / 8 / math.sqrt(3),
    ),
]


@functools.cache
def first_leaves(name):
    settings = next(row[1] for row in FIRST_VALUES if row[0] == name)
    model = MODELS[name]((28, 28, 3), **settings)
    params = by_block_name(model.init(jax.random.key(0))["params"])
    return {name: np.asarray(leaf) for name, leaf in by_name(params).items()}


@pytest.mark.parametrize("name, settings, leaf, shape, deviation", FIRST_VALUES)
def test_first_values_have_the_papers_deviation(name, settings, leaf, shape, deviation):
    found = first_leaves(name)[leaf]
    assert found.shape == shape
    np.testing.assert_allclose(found.std(), deviation, rtol=0.05)
