"""Adapters that PEFT opens, around a network of PyTorch with the same numbers."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import fedfr_jax as ff
from fedfr_jax.models import MODELS
from fedfr_jax.models.adapters import lora, prompt

KEY = jax.random.key(0)
SIDE = (8, 8, 3)


def shaken(tree, seed=0):
    rng = np.random.default_rng(seed)
    shake = lambda x: (x + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)
    return jax.tree.map(shake, tree)


def adapted_cnn():
    base = MODELS["cnn"](SIDE, widths=(4, 6), embedding_dim=5, num_classes=3)
    variables = shaken(base.init(KEY))
    model = ff.with_adapter(base, lora(rank=2, alpha=3), variables=variables)
    return base, variables, model, shaken(model.init(KEY), 1)


def test_the_folder_has_pefts_names_and_layouts(tmp_path):
    _, _, model, moving = adapted_cnn()
    ff.save_adapter(tmp_path, model, moving, lambda name: f"net.{name}")
    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    shapes = {
        k.removeprefix("base_model.model.net."): x.shape for k, x in arrays.items()
    }
    assert shapes == {
        "conv1.lora_A.weight": (2, 3, 3, 3),
        "conv1.lora_B.weight": (4, 2, 1, 1),
        "conv2.lora_A.weight": (2, 4, 3, 3),
        "conv2.lora_B.weight": (6, 2, 1, 1),
        "fc.lora_A.weight": (2, 24),
        "fc.lora_B.weight": (5, 2),
        "classifier.weight": (3, 5),
        "classifier.bias": (3,),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["target_modules"] == ["net.conv1", "net.conv2", "net.fc"]
    assert config["modules_to_save"] == ["net.classifier"]


def test_another_adapter_is_refused(tmp_path):
    base = MODELS["vit"]((16, 16, 3), width=8, depth=2, num_heads=2, patch_size=8)
    model = ff.with_adapter(base, prompt())
    with pytest.raises(ValueError, match="must be lora"):
        ff.save_adapter(tmp_path, model, model.init(KEY))


def test_peft_opens_it_and_computes_the_same(tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    base, variables, model, moving = adapted_cnn()
    ff.save_adapter(tmp_path, model, moving)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 6, 3)
            self.fc, self.classifier = torch.nn.Linear(24, 5), torch.nn.Linear(5, 3)

        def forward(self, x):
            x = self.conv2(self.conv1(x).relu()).relu()
            x = torch.nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1)
            return self.classifier(self.fc(x).relu())

    state = {}
    for layer, leaves in variables["params"].items():
        kernel = np.asarray(leaves["kernel"])
        order = (kernel.ndim - 1, kernel.ndim - 2, *range(kernel.ndim - 2))
        state[f"{layer}.weight"] = torch.from_numpy(kernel.transpose(order).copy())
        state[f"{layer}.bias"] = torch.from_numpy(np.array(leaves["bias"]))
    net = Net()
    net.load_state_dict(state)
    x = np.random.default_rng(2).normal(size=(4, *SIDE)).astype(np.float32)
    opened = peft.PeftModel.from_pretrained(net, str(tmp_path))
    with torch.no_grad():
        found = opened(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(found, model.output(moving, x), rtol=1e-4, atol=1e-5)
    assert np.abs(found - base.output(variables, x)).max() > 1e-2
