"""The network of a config, tried before anything is trained."""

import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.iresnet import DEPTHS
from fedfr_jax.parts import parse
from fedfr_jax.ranges import Depth
from fedfr_jax.schema import has_kind
from fedfr_jax.tasks.model import NetworkReader, build_network, is_dtype

SHAPE = (4, 4, 1)


def built(settings):
    return build_network(parse(NetworkReader(), settings, "config.model"), SHAPE)


def test_a_network_that_cannot_run_is_refused_with_its_settings(monkeypatch):
    def broken(*given):
        raise TypeError("no such axis")

    made = MODELS["mlp"](SHAPE, num_classes=3)._replace(
        apply=broken, apply_with_features=None
    )
    monkeypatch.setitem(MODELS, "broken", lambda input_shape: made)
    message = "config.model must be usable as .*'broken'.*got TypeError: no such axis"
    with pytest.raises(ValueError, match=message):
        built({"name": "broken"})


ENCODER = {"name": "resnet", "widths": (8, 0)}
WRONG = [
    ({"name": "vit", "depth": 4097, "patch_size": 4}, r"depth must .*4096\], got 4097"),
    ({"name": "mlp", "hidden_dim": 0}, r"hidden_dim must be in \[1, 65536\], got 0"),
    (
        {"name": "segmenter", "num_classes": 2, "encoder": ENCODER},
        r"encoder.widths must be in .*got \(8, 0\)",
    ),
    *(
        ({"name": "resnet", "num_classes": 2, "dtype": dtype}, "dtype must be None or")
        for dtype in (
            0,
            "",
            "(2,",
            "a\udcff",
            "int8",
            {"name": "x"},
            (None, None),
            b"f4",
        )
    ),
]


def test_settings_that_no_network_has_are_refused_before_one_is_made():
    for settings, message in WRONG:
        with pytest.raises(ValueError, match=f"^config.model.{message}"):
            built(settings)
    assert is_dtype("bfloat16")


def test_sizes_at_their_bounds_and_multipliers_are_taken():
    assert has_kind(Depth, max(DEPTHS))
    most = {"name": "mlp", "hidden_dim": 2**16, "num_classes": 3}
    assert built(most).output.shape == (1, 3)
    none = {"name": "sphereface", "blocks": (0,), "widths": (1,), "embedding_dim": 1}
    assert built(none).output.shape == (1, 1)
    half = {"name": "mobilenet", "width": 0.5, "num_classes": 3}
    assert built(half).output.shape == (1, 3)
