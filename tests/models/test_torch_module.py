"""PyTorch modules in JAX: PyTorch's outputs, gradients and statistics; runs.

Without PyTorch these are skipped; `make test-torch` has an environment of its own.
`python -m tests.models.test_torch_module` makes golden/torch_module.npz.
"""

import json
import pathlib
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.models import MODELS
from fedfr_jax.models.torch_graph import from_json, state_arrays, to_json

torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
nn, F = torch.nn, torch.nn.functional
# Of torch and what it imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "torch_module.npz"


class BlazeCnn(nn.Module):
    """BlazeFL's small network."""

    def __init__(self):
        super().__init__()
        first = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        top = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        self.body = nn.Sequential(*first, *second, *top, nn.Linear(84, 10))

    def forward(self, x):
        return self.body(x)


class PfllibCnn(nn.Module):
    """PFLlib's network for CIFAR-10."""

    def __init__(self):
        super().__init__()
        layer = lambda i, o: nn.Sequential(
            nn.Conv2d(i, o, 5), nn.ReLU(inplace=True), nn.MaxPool2d((2, 2))
        )
        self.conv1, self.conv2 = layer(3, 32), layer(32, 64)
        self.fc1 = nn.Sequential(nn.Linear(1600, 512), nn.ReLU(inplace=True))
        self.fc = nn.Linear(512, 10)

    def forward(self, x):
        x = torch.flatten(self.conv2(self.conv1(x)), 1)
        return self.fc(self.fc1(x))


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.downsample = None
        if stride != 1 or i != o:
            conv = nn.Conv2d(i, o, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(o))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A ResNet-18 as torchvision's, narrower."""

    def __init__(self, widths=(8, 12, 16, 20), blocks=2):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, i = [], widths[0]
        for number, o in enumerate(widths):
            stage = [Block(i, o, 1 if number == 0 else 2)]
            stages.append(nn.Sequential(*stage, *[Block(o, o, 1)] * (blocks - 1)))
            i = o
        self.layers, self.avgpool = nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(i, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class FrozenNorms(ResNet):
    """Its batch norms evaluate while it trains, and its first layer stays."""

    def __init__(self):
        super().__init__((8, 12), 1)
        self.conv1.weight.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class Vit(nn.Module):
    """A vision transformer as timm's."""

    def __init__(self, dim=24, heads=3, depth=2):
        super().__init__()
        self.heads, self.patch = heads, nn.Conv2d(3, dim, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 17, dim))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{"norm1": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim)},
                    **{"proj": nn.Linear(dim, dim), "norm2": nn.LayerNorm(dim)},
                    **{"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)},
                }
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            b, n, c = x.shape
            qkv = block["qkv"](block["norm1"](x)).reshape(b, n, 3, self.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            x = x + block["proj"](y.reshape(b, n, c))
            x = x + block["fc2"](F.gelu(block["fc1"](block["norm2"](x))))
        return self.head(self.norm(x)[:, 0])


class Layers(nn.Module):
    """Convolutions of all kinds, pooling and normalization."""

    def __init__(self):
        super().__init__()
        self.same = nn.Conv2d(3, 8, (3, 4), padding="same")
        self.group_norm, self.slope = nn.GroupNorm(2, 8), nn.PReLU(16)
        self.depthwise = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=8)
        self.dilated = nn.Conv2d(16, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        # A bias before a normalization has no gradient but rounding.
        self.grouped_up = nn.ConvTranspose2d(6, 8, (2, 3), 2, groups=2, bias=False)
        self.instance_norm = nn.InstanceNorm2d(8, affine=True)
        self.pool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)

    def forward(self, x):
        x = F.hardswish(self.group_norm(self.same(x)))
        x = self.dilated(self.slope(self.depthwise(x)))
        x = self.pool(self.instance_norm(self.grouped_up(self.up(x))))
        x = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)
        x = F.avg_pool2d(x, 2, 1, 1, count_include_pad=False)
        x = F.pixel_shuffle(F.interpolate(x, scale_factor=2, mode="nearest"), 2)
        x = F.pad(x, (1, 2, 0, 1), mode="reflect")
        y = F.interpolate(F.adaptive_avg_pool2d(x, (3, 2)), (4, 5), mode="bilinear")
        z = F.interpolate(y, scale_factor=1.5, mode="bilinear", align_corners=True)
        pooled = x.mean((2, 3)), y.amax((2, 3)), z.std((2, 3)), z[:, :, 1].sum(2)
        return torch.cat(pooled, 1)


class DilatedPools(nn.Module):
    """Maxima of windows with gaps, of values many of which are equal."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.first = nn.MaxPool2d(3, 1, 1, dilation=2)
        self.second = nn.MaxPool2d((2, 3), 2, (1, 0), dilation=(1, 3), ceil_mode=True)

    def forward(self, x):
        return self.second(self.first(F.relu(self.conv(x)))).flatten(1)


class Functions(nn.Module):
    """Shapes, products and functions of numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(48, 48), nn.LayerNorm(12)
        self.second, self.batch_norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.register_buffer("rows", torch.tensor([2, 0, 1]))
        self.register_buffer("shift", torch.linspace(-1, 1, 12))

    def forward(self, x):
        x = self.norm(self.first(x).view(x.size(0), 4, -1)[:, self.rows])
        q, k = self.second(x).chunk(2, dim=2)
        x = x + ((q @ k.transpose(1, 2)) / 6**0.5).softmax(-1) @ x
        x = torch.stack([*x.unbind(1), x.mean(1), x[:, -1] / 3], 1) * self.shift
        x = F.gelu(x) + F.silu(x) - F.leaky_relu(x, 0.2) + F.elu(x) + F.softplus(x)
        x = x + F.relu6(4 * x) + F.hardsigmoid(x) + F.mish(x) + torch.sigmoid(x)
        x = x + F.gelu(x, approximate="tanh") + x * x.detach() + x.abs().sqrt()
        x = F.pad(x, (1, 1, 0, 1)).roll(1, 1).flip(2).clamp(-2, 3)
        x = torch.where(x > 0, x, 0.1 * x) + x.masked_fill(x < -1, 0.0)
        y = F.normalize(self.batch_norm(x.amax(1)[:, 1:-1]), dim=1)
        y[:, 0] = 1.0
        return (y + torch.arange(12) * 0.1).log_softmax(1)


class Spread(nn.Module):
    """Deviations and variances by every overload."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, x):
        x = self.conv(x)
        whole = x.var(correction=0) + x.var(unbiased=False) + torch.std(x, False)
        of_each = [
            torch.var(x, 1, False).mean((1, 2)),
            x.std(dim=(2, 3), keepdim=True).mean((1, 2, 3)),
            torch.std(x, 3, unbiased=False).mean((1, 2)),
            x.flatten(1).var(1),
            x.mean((1, 2, 3)) + whole,
        ]
        return torch.stack(of_each, 1)


CASES = {
    "blazefl": (BlazeCnn, (32, 32, 3), True),
    "pfllib": (PfllibCnn, (32, 32, 3), True),
    "resnet_training": (ResNet, (48, 40, 3), True),
    "resnet": (ResNet, (48, 40, 3), False),
    "frozen": (FrozenNorms, (24, 24, 3), True),
    "vit": (Vit, (32, 32, 3), True),
    "layers": (Layers, (16, 12, 3), True),
    "dilated_pools": (DilatedPools, (14, 13, 3), True),
    "spread": (Spread, (8, 7, 3), True),
    "functions_training": (Functions, (48,), True),
    "functions": (Functions, (48,), False),
}


def made(make, seed=0):
    """A module with statistics and scales that are not the first ones."""
    torch.manual_seed(seed)
    module = make()
    for name, tensor in module.state_dict().items():
        if tensor.ndim == 1 and ("norm" in name or "bn" in name or "running" in name):
            nn.init.uniform_(tensor, 0.5, 1.5)
    return module


def of_torch(module, x, train, cotangent):
    """Outputs, gradients and statistics by PyTorch in float64, by name."""
    module = module.double().train(train)
    x = torch.tensor(np.moveaxis(x, -1, 1) if x.ndim == 4 else x).double()
    output = module(x)
    (output * torch.tensor(cotangent)).sum().backward()
    grads = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    stats = {k: b for k, b in module.named_buffers() if b.is_floating_point()}
    return output.detach().numpy(), {**grads, **stats}


def of_jax(model, variables, x, train, cotangent):
    """Outputs, gradients and statistics in JAX, as variables."""

    def loss(params):
        given = {**variables, "params": params}
        output, stats = model.apply(given, x, train, key=jax.random.key(0))
        return (output * cotangent).sum(), (output, stats)

    grads, (output, stats) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    return np.asarray(output), {"params": grads, "batch_stats": stats}


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
def test_a_module_has_pytorchs_outputs_gradients_and_statistics(case):
    make, shape, train = CASES[case]
    module = made(make)
    model = ff.from_torch(module, shape)
    variables = model.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, *shape)).astype(np.float32)
    cotangent = rng.normal(size=(5, model.embedding_dim)).astype(np.float32)
    output, ours = of_jax(model, variables, x, train, cotangent)
    truth, theirs = of_torch(module, x, train, cotangent)
    np.testing.assert_allclose(output, truth, rtol=1e-5, atol=1e-5)
    found = ff.to_torch(model, ours)
    assert len(theirs) >= len(jax.tree.leaves(ours["params"]))
    largest = max(np.abs(x.numpy()).max() for x in theirs.values())
    for name, wanted in theirs.items():
        scale = max(np.abs(wanted.numpy()).max(), 1e-2 * largest)
        error = np.abs(found[name].numpy() - wanted.numpy()).max()
        assert error <= 1e-5 * scale, name


def test_state_dicts_return_strictly_and_the_module_stays():
    module = made(lambda: ResNet((4, 6), 1)).eval()
    before = {k: x.clone() for k, x in module.state_dict().items()}
    model = ff.from_torch(module, (24, 24, 3))
    variables = model.init(jax.random.key(3))
    assert not module.training
    assert {k: torch.equal(x, module.state_dict()[k]) for k, x in before.items()}
    other = made(lambda: ResNet((4, 6), 1), seed=1)
    other.load_state_dict(ff.to_torch(model, variables), strict=True)
    assert all(torch.equal(x, before[k]) for k, x in other.state_dict().items())
    moved = jax.tree.map(lambda x: x + 1, variables)
    other.load_state_dict(ff.to_torch(model, moved))
    assert torch.equal(other.conv1.weight, module.conv1.weight + 1)
    assert variables["params"]["layers"]["0"]["0"]["conv1"]["weight"].shape[2:] == (
        4,
        4,
    )
    assert model.blocks[0] == "conv1" and model.blocks[-1] == "fc"
    assert {*variables["batch_stats"]["bn1"]} == {"running_mean", "running_var"}


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that is not stored."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale


def test_a_shared_weight_is_one_leaf_with_two_names():
    module = made(Tied)
    model = ff.from_torch(module, (4,))
    variables = model.init(jax.random.key(0))
    assert len(jax.tree.leaves(variables["params"])) == 3
    state = ff.to_torch(model, variables)
    module.load_state_dict(state)
    assert {*state} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    x = np.ones((2, 4), np.float32)
    wanted = module(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(model.output(variables, x), wanted, rtol=1e-5)


@pytest.mark.ci
def test_a_cohort_of_models_is_each_alone_for_any_batch():
    module = made(lambda: ResNet((4, 6), 1))
    model = ff.from_torch(module, (24, 24, 3))
    first = model.init(jax.random.key(0))
    clients = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, 2 * x]), first)
    rng = np.random.default_rng(0)
    for batch in (1, 3, 8):
        x = rng.normal(size=(3, batch, 24, 24, 3)).astype(np.float32)
        outputs, _ = jax.jit(jax.vmap(model.apply))(clients, x)
        for i in range(3):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], clients)
            module.load_state_dict(ff.to_torch(model, own))
            with torch.no_grad():
                alone = module.eval()(torch.tensor(np.moveaxis(x[i], -1, 1)))
            np.testing.assert_allclose(outputs[i], alone, rtol=1e-4, atol=1e-4)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(0.25)
        self.maps = nn.Dropout2d(0.5)

    def forward(self, x):
        y = self.maps(x.view(-1, 100, 1, 4)).flatten(1)
        return torch.cat([self.drop(x * self.scale), y], 1)


def test_dropout_is_drawn_from_the_key_in_training_only():
    model = ff.from_torch(Dropped(), (400,))
    variables, x = model.init(jax.random.key(0)), np.ones((50, 400), np.float32)
    draw = lambda seed: model.apply(variables, x, True, key=jax.random.key(seed))[0]
    one, other = np.array(draw(0)), np.array(draw(1))
    assert (one == draw(0)).all() and (one != other).any()
    numbers, maps = one[:, :400], one[:, 400:].reshape(50, 100, 4)
    assert {*np.unique(numbers)} == {0, np.float32(1 / 0.75)}
    assert abs((numbers > 0).mean() - 0.75) < 0.02
    assert {*np.unique(maps)} == {0, 2} and (maps == maps[..., :1]).all()
    assert abs((maps > 0).mean() - 0.5) < 0.04
    assert (np.asarray(model.apply(variables, x)[0]) == 1).all()
    with pytest.raises(ValueError, match="key must be given"):
        model.apply(variables, x, True)


class StochasticDepth(nn.Module):
    """Residuals that are left out, as torchvision's and timm's networks do it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if not self.training:
            return torch.addcmul(x, x, self.scale, value=0.5)
        rows = torch.empty(x.shape[0], 1).bernoulli_(0.75)
        numbers = torch.empty_like(x).bernoulli_(0.5)
        return x.clone().zero_() + self.scale * rows.div_(0.75) + 8 * numbers


def test_residuals_are_left_out_by_the_share_that_is_asked():
    model = ff.from_torch(StochasticDepth(), (50,))
    variables, x = model.init(jax.random.key(0)), np.ones((400, 50), np.float32)
    drawn = np.asarray(model.apply(variables, x, True, key=jax.random.key(0))[0])
    rows, numbers = drawn % 8, drawn >= 8
    assert (np.abs(rows - rows[:, :1]) < 1e-5).all()
    assert abs((rows[:, 0] > 0).mean() - 0.75) < 0.07
    assert abs(numbers.mean() - 0.5) < 0.02 and 0 < numbers[0].sum() < 50
    np.testing.assert_allclose(model.output(variables, x), 1.5, rtol=1e-6)


class Forward(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, forward):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.function(self.fc, x)


def without_gradient(fc, x):
    with torch.no_grad():
        y = fc(x)
    return fc(x) + y


REFUSED = {
    "operators that are known here, got aten.fft_fft": lambda fc, x: (
        torch.fft.fft(fc(x)).real
    ),
    "control flow that depends on the values": lambda fc, x: (
        fc(x) if x.sum() > 0 else x
    ),
    "code for one size of the batch": lambda fc, x: fc(x.view(8, 4)),
    "return one tensor, got 2": lambda fc, x: (fc(x), x),
    "no region of wrap_with_set_grad_enabled": without_gradient,
    "leave its input x as it is": lambda fc, x: fc(x.mul_(2)),
    "got aten.index": lambda fc, x: fc(x[x > 0].view(-1, 4)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_supported_is_one_line(words):
    with pytest.raises(ValueError, match=words) as caught:
        ff.from_torch(Forward(REFUSED[words]), (4,))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("module must ")


def test_the_gradient_of_a_norm_of_zeros_is_zero_as_in_pytorch():
    forward = lambda fc, x: torch.nn.functional.normalize(fc(x * 0) - fc.bias + x)
    model = ff.from_torch(Forward(forward), (4,))
    variables = model.init(jax.random.key(0))
    of = jax.grad(lambda x: model.apply(variables, x)[0].sum())
    assert np.isfinite(of(np.zeros((2, 4), np.float32))).all()


def test_an_error_says_where_in_the_module_an_operator_is():
    inner = Forward(lambda fc, x: torch.fft.fft(fc(x)).real)
    with pytest.raises(ValueError, match="fft_fft.default in the module's 1"):
        ff.from_torch(nn.Sequential(nn.Linear(4, 4), inner), (4,))
    with pytest.raises(ValueError, match="must be a torch.nn.Module, got <class"):
        ff.from_torch(nn.Linear, (4,))
    with pytest.raises(ValueError, match="have parameters that require"):
        ff.from_torch(nn.Flatten(), (4, 4, 1))
    with pytest.raises(ValueError, match="model must be one of ff.from_torch"):
        ff.to_torch(MODELS["mlp"]((4,)), {})


def test_a_client_that_trains_alone_is_pytorchs_sgd():
    module = made(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU()))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 2, 2, 3)).astype(np.float32)
    y = rng.integers(0, 5, 6).astype(np.int32)
    model = ff.from_torch(module, (2, 2, 3))

    def loss(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (stats, {})

    training = ff.LocalTraining(loss, optax.sgd, learning_rate=0.5)
    data = ff.FederatedDataset.from_client_ids(x, y, np.zeros(6, int))
    first = model.init(jax.random.key(0))
    run = ff.init(ff.fedavg(training), data, first, batch_size=6)
    run, _ = ff.run_rounds(run, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        logits = module(torch.tensor(np.moveaxis(x, -1, 1)))
        F.cross_entropy(logits, torch.tensor(y).long()).backward()
        optimizer.step()
    found = ff.to_torch(model, jax.device_get(run.variables))
    for name, wanted in module.state_dict().items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
"""
CONFIG = """
from fedfr_jax.configs import base

def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "fake_data", "num_identities": 3}
    config.data.update({"image_size": 8, "channels": 1})
    config.partition = {"name": "iid", "num_clients": 3}
    config.model = {"name": "torch", "file": "mine.py:Net", "width": 5}
    config.federation = {"rounds": 2, "local_epochs": 1, "batch_size": 8}
    config.methods = {"fedavg": {"algorithm": "fedavg", "learning_rate": 0.1}}
    return config.lock()
"""


@pytest.mark.ci
def test_a_file_of_a_config_trains_resumes_evaluates_and_returns(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(textwrap.dedent(MINE))
    pathlib.Path("config.py").write_text(CONFIG)
    train = ["train", "--config=config.py", "--workdir=run"]
    assert main([*train, "--config.federation.rounds=1"]) == 0
    assert main(train) == 0
    assert main([*train[:2], "--workdir=whole"]) == 0
    one, other = (ff.load_model(name).weights.arrays for name in ("run", "whole"))
    assert all((one[name] == other[name]).all() for name in one)
    assert main(["evaluate", "--config=config.py", "--workdir=run"]) == 0
    assert main(["export", "--weights=run", "--output=back.pth"]) == 0
    space: dict = {}
    exec(MINE, space)
    module = space["Net"](5, 3)
    module.load_state_dict(torch.load("back.pth"), strict=True)
    x = np.random.default_rng(0).uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32)
    trained = ff.load_model("run")
    with torch.no_grad():
        wanted = module.eval()(torch.tensor(np.moveaxis(x, -1, 1)))
    found = trained.apply(trained.variables, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    assert main(["evaluate", "--workdir=run"]) != 0
    assert "Give --config" in capsys.readouterr().err


FILES = {
    "must be .FILE.py:CLASS. of a file": "absent.py:Net",
    "must define Other": "mine.py:Other",
    "must run without errors, got ZeroDivisionError.* line 2": "broken.py:Net",
    "must be a torch.nn.Module, got 3": "mine.py:number",
    "must have the arguments of .*colour": "mine.py:Net",
}


@pytest.mark.parametrize("words", FILES)
def test_a_file_without_a_module_is_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = textwrap.dedent(MINE) + "\ndef number(**_):\n    return 3\n"
    pathlib.Path("mine.py").write_text(text)
    pathlib.Path("broken.py").write_text("a = 1\na / 0\n")
    more = {"colour": 1} if "colour" in words else {}
    with pytest.raises(ValueError, match=words) as caught:
        MODELS["torch"]((8, 8, 1), file=FILES[words], **more)
    assert "\n" not in str(caught.value)


def test_a_seed_draws_the_numbers_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(textwrap.dedent(MINE))
    model = MODELS["torch"]((8, 8, 1), file="mine.py:Net", num_classes=3)
    assert model.embedding_dim == 3
    draw = lambda seed: model.init(jax.random.key(seed))["params"]["head"]["weight"]
    assert (draw(0) == draw(0)).all() and (draw(0) != draw(1)).any()
    assert (jax.jit(draw, static_argnums=0)(1) == draw(1)).all()


@pytest.mark.ci
def test_the_tutorial_is_an_example_that_runs(capsys):
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "tutorials" / "pytorch.md").read_text()
    code = page.split("```python\n")[1].partition("```")[0]
    assert (root / "examples" / "pytorch.py").read_text().endswith(f'"""\n\n{code}')
    space: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, space)
    assert float(capsys.readouterr().out) > 0.85
    assert space["run"].round_number == 10


def make_golden():
    """Write golden/torch_module.npz: a graph, numbers, and what PyTorch computes."""
    module = made(lambda: ResNet((3, 4), 1))
    model = ff.from_torch(module, (12, 12, 3))
    network = from_json(model.config["graph"])
    variables = model.init(jax.random.key(0))
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 12, 12, 3)).astype(np.float32)
    cotangent = rng.normal(size=(4, 10)).astype(np.float32)
    arrays = {f"state/{k}": v for k, v in state_arrays(network, variables).items()}
    for mode in ("train", "evaluate"):
        copy = made(lambda: ResNet((3, 4), 1))
        output, values = of_torch(copy, x, mode == "train", cotangent)
        arrays[f"{mode}/output"] = np.float32(output)
        arrays |= {f"{mode}/of/{k}": np.float32(v) for k, v in values.items()}
    graph = np.frombuffer(json.dumps(to_json(network)).encode(), np.uint8)
    np.savez_compressed(GOLDEN, graph=graph, x=x, cotangent=cotangent, **arrays)


if __name__ == "__main__":
    make_golden()
