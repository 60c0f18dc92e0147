"""What `fedfr describe CONFIG` says leaves a client, of configs that are shipped."""

import pathlib
import runpy

import jax
import pytest

from fedfr_jax.cli import plan
from fedfr_jax.cli.describe import print_disclosures
from fedfr_jax.runs import shapes

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture
def described(monkeypatch, capsys):
    """described(config, stages) -> ({stage: disclosure}, what the command prints)."""

    def describe(name, stages):
        config = runpy.run_path(str(CONFIGS / name))["get_config"]()
        found, whole = {}, shapes.disclose_stage

        def disclose(experiment, stage):
            if stage in stages:
                found[stage] = whole(experiment, stage)
            return found.get(stage)

        monkeypatch.setattr(plan, "use_virtual", lambda devices: None)
        monkeypatch.setattr(shapes, "disclose_stage", disclose)
        with jax.numpy_dtype_promotion("standard"):
            print_disclosures(config)
        return found, capsys.readouterr().out

    return describe


@pytest.mark.parametrize(
    ("config", "stages", "personal"),
    [
        pytest.param(
            *("fedfr/demo.py", ["fedfr"], ["params/head", "params/branch"]),
            marks=pytest.mark.slow,
        ),
        ("fedper/cifar10.py", ["fedper_1"], ["params/fc"]),
    ],
)
def test_no_personal_leaf_of_a_shipped_config_is_sent_or_received(
    described, config, stages, personal
):
    found, text = described(config, stages)
    assert found.keys() == {*stages}
    for stage, one in found.items():
        moved = [x.name for x in (*one.summed, *one.per_client, *one.trace.received)]
        kept = [x.name for x in one.kept]
        assert moved and f"{stage}\n  sent up," in text
        for leaf in personal:
            assert any(leaf in name for name in kept), kept
            assert not [name for name in moved if leaf in name]
            assert leaf not in text.partition("stays with the client")[0]
