"""The networks, the plain local training and the accuracy in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from workloads import (
    ALPHA,
    BLOCKS,
    DIM,
    RANK,
    TARGETS,
    VIT,
    WIDTHS,
    Workload,
    digest,
)


def network(work: Workload) -> nn.Module:
    """The classifier, Glorot uniform with zero biases, or one of `peft`."""
    if work.model == "vit":
        return lora(work)
    if work.model == "resnet18":
        return resnet18(work)
    height, _, channels = work.input_shape
    if work.model == "mlp":
        pixels = height * height * channels
        layers = [nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU()]
        width = 64
    elif work.model == "lenet":
        pooled, width = ((height - 4) // 2 - 4) // 2, 84
        layers = [nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(16 * pooled**2, 120), nn.ReLU()]
        layers += [nn.Linear(120, width), nn.ReLU()]
    elif work.model == "wide_lenet":
        pooled, width = ((height - 4) // 2 - 4) // 2, 512
        layers = [nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(64 * pooled**2, width), nn.ReLU()]
    else:
        width, pooled = 128, (height - 4) // 2
        drops = [[nn.Dropout(share)] if share else [] for share in work.dropout]
        layers = [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3)]
        layers += [nn.ReLU(), nn.MaxPool2d(2), *drops[0], nn.Flatten()]
        layers += [nn.Linear(64 * pooled**2, width), nn.ReLU(), *drops[1]]
    model = nn.Sequential(*layers, nn.Linear(width, work.num_classes))
    torch.manual_seed(0)
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


class BasicBlock(nn.Module):
    """ReLU(shortcut(x) + BN(conv(ReLU(BN(conv(x))))))."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        norm = lambda conv: nn.Sequential(conv, nn.BatchNorm2d(width))
        first = norm(nn.Conv2d(inputs, width, 3, stride, 1, bias=False))
        second = norm(nn.Conv2d(width, width, 3, 1, 1, bias=False))
        self.body, self.shortcut = (
            nn.Sequential(first, nn.ReLU(), second),
            nn.Identity(),
        )
        if inputs != width:
            self.shortcut = norm(nn.Conv2d(inputs, width, 1, stride, bias=False))

    def forward(self, x):
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet18(work: Workload) -> nn.Module:
    """torchvision's network of this name: a stem of 7x7 and max pooling."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(work.input_shape[2], 64, 7, 2, 3, bias=False)]
    layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width in (64, 128, 256, 512):
        stride = 1 if width == before else 2
        layers += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
        before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, work.num_classes)]
    model = nn.Sequential(*layers, *head)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + linear(GELU(linear(norm(x))))."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, wide = heads, 4 * width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x):
        batch, count, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, count, 3, self.heads, -1)
        y = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.proj(y.transpose(1, 2).reshape(batch, count, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """timm's, with a class token."""

    def __init__(self, input_shape, classes, width, depth, num_heads, patch_size):
        super().__init__()
        height, _, channels = input_shape
        count = (height // patch_size) ** 2 + 1
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, count, width))
        blocks = (TransformerBlock(width, num_heads) for _ in range(depth))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.fc(self.norm(self.blocks(x)[:, 0]))


def lora(work: Workload) -> nn.Module:
    """The transformer in `peft`, frozen but for LoRA and the last layer."""
    import peft  # which the other workloads' environments need not have

    torch.manual_seed(0)
    base = VisionTransformer(work.input_shape, work.num_classes, **VIT)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    config = peft.LoraConfig(**settings, modules_to_save=["fc"])
    return peft.get_peft_model(base, config)


def moving(model: nn.Module) -> dict[str, torch.Tensor]:
    """State of a module but for what is frozen: all that a client sends."""
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in frozen}


def tensors(images: np.ndarray, labels: np.ndarray) -> tuple:
    """Channels first, contiguous; labels int64."""
    images = np.ascontiguousarray(np.moveaxis(images, -1, -3))
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def train(model: nn.Module, images, labels, work: Workload) -> None:
    """A client's local training, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.rate)
    model.train()
    for _ in range(work.epochs):
        for batch, target in zip(
            images.split(work.batch_size), labels.split(work.batch_size), strict=True
        ):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(batch), target).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images, labels) -> float:
    """Fraction of the test images that are classified rightly."""
    model.eval()
    parts = zip(images.split(1000), labels.split(1000), strict=True)
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in parts)
    return right / len(labels)


def digest_of(model: nn.Module) -> str:
    """Of all leaves of the state, see `workloads.digest`."""
    return digest(x.cpu().numpy() for x in model.state_dict().values())


class Residual(nn.Module):
    """x + PReLU(conv(PReLU(conv(x))))."""

    def __init__(self, width):
        super().__init__()
        convs = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(convs[0], nn.PReLU(width), convs[1], nn.PReLU(width))
        for conv in convs:
            nn.init.normal_(conv.weight, std=0.01)

    def forward(self, x):
        return x + self.body(x)


def sphereface(work: Workload) -> nn.Module:
    """The backbone of fedfr_step, images to [B, DIM]."""
    torch.manual_seed(0)
    layers, previous, size = [], work.input_shape[2], work.input_shape[0]
    for width, blocks in zip(WIDTHS, BLOCKS, strict=True):
        conv = nn.Conv2d(previous, width, 3, stride=2, padding=1)
        nn.init.xavier_uniform_(conv.weight)
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.PReLU(width), *(Residual(width) for _ in range(blocks))]
        previous, size = width, -(-size // 2)
    last = nn.Linear(previous * size**2, DIM)
    nn.init.xavier_uniform_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, nn.Flatten(), last)


class Block(nn.Module):
    """InsightFace's residual block: BN, conv, BN, PReLU, conv, BN, and the shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        conv = lambda i, stride: nn.Conv2d(i, width, 3, stride, 1, bias=False)
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(inputs), conv(inputs, 1)),
            *(nn.BatchNorm2d(width), nn.PReLU(width)),
            *(conv(width, stride), nn.BatchNorm2d(width)),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            short = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(short, nn.BatchNorm2d(width))

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


def iresnet(widths, blocks, dim, size):
    """Stem, stages that begin with a stride of 2, the head E."""
    first = widths[0]
    layers = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first)]
    layers.append(nn.PReLU(first))
    before = [first, *widths]
    for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        layers.append(Block(before[i], width, 2))
        layers += [Block(width, width, 1) for _ in range(count - 1)]
        size = -(-size // 2)
    layers += [nn.BatchNorm2d(widths[-1]), nn.Flatten()]
    last = nn.BatchNorm1d(dim)
    last.weight.requires_grad = False  # fixed at 1
    return nn.Sequential(*layers, nn.Linear(widths[-1] * size**2, dim), last)
