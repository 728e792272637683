"""What people run: small programs and models, each as it would be written for any device.

A workload is a function of a device and of `wrap`, which is the identity or `torch.compile`. It returns a callable that
does one step of the work; all that is set up before is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.models import GPT, Block

Step = Callable[[], Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Workload:
    """`kind`: chain (a run of fusible operators), tiny (a loop of calls on tiny tensors) or model."""

    name: str
    kind: str
    make: Callable[[str, Wrap], Step]


WORKLOADS: list[Workload] = []


def workload(kind: str) -> Callable[[Callable[[str, Wrap], Step]], Callable[[str, Wrap], Step]]:
    """Adds the function below to the list."""

    def add(make: Callable[[str, Wrap], Step]) -> Callable[[str, Wrap], Step]:
        WORKLOADS.append(Workload(make.__name__, kind, make))
        return make

    return add


def randn(device: str, *shape: int) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape).to(device)


def training(model: nn.Module, wrap: Wrap, loss_of: Callable[..., torch.Tensor], *data: torch.Tensor) -> Step:
    """A step of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loss_of = wrap(loss_of)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*data)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def inference(model: nn.Module, wrap: Wrap, *data: torch.Tensor) -> Step:
    """The forward pass without gradients."""
    forward = wrap(model.eval())

    def step() -> torch.Tensor:
        with torch.no_grad():
            return forward(*data)

    return step


# Chains ----------------------------------------------------------------------------------------------------------


@workload("chain")
def pointwise_chain(device: str, wrap: Wrap) -> Step:
    x, y = randn(device, 512, 512), randn(device, 512, 512)
    f = wrap(lambda x, y: torch.sigmoid(x * 1.7 + y) * torch.tanh(y - 0.5) + (x * x + y * y + 1e-3).sqrt() - x.abs())
    return lambda: f(x, y)


@workload("chain")
def masked_softmax(device: str, wrap: Wrap) -> Step:
    scores = randn(device, 8, 8, 128, 128)
    mask = torch.ones(128, 128, dtype=torch.bool).tril().to(device)
    f = wrap(lambda s: s.mul(1 / math.sqrt(64)).masked_fill(~mask, float("-inf")).softmax(-1))
    return lambda: f(scores)


@workload("chain")
def residual_dropout_layer_norm(device: str, wrap: Wrap) -> Step:
    x, residual = randn(device, 1024, 768), randn(device, 1024, 768)
    norm = nn.LayerNorm(768).to(device).requires_grad_(False)
    f = wrap(lambda x, r: norm(F.dropout(x, 0.1, True) + r))
    return lambda: f(x, residual)


@workload("chain")
def rms_norm_rotary(device: str, wrap: Wrap) -> Step:
    x, weight = randn(device, 4, 256, 8, 64), randn(device, 64)
    angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 64, 2) / 64))
    cos, sin = (f(angles)[:, None, :].to(device) for f in (torch.cos, torch.sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    f = wrap(rotate)
    return lambda: f(x)


@workload("chain")
def swiglu(device: str, wrap: Wrap) -> Step:
    gate, up = randn(device, 1024, 1536), randn(device, 1024, 1536)
    f = wrap(lambda g, u: F.silu(g) * u)
    return lambda: f(gate, up)


@workload("chain")
def cross_entropy(device: str, wrap: Wrap) -> Step:
    logits = randn(device, 1024, 2048).requires_grad_()
    labels = torch.randint(0, 2048, (1024,)).to(device)
    f = wrap(lambda x: F.cross_entropy(x, labels))

    def step() -> torch.Tensor:
        logits.grad = None
        f(logits).backward()
        return logits.grad

    return step


@workload("chain")
def adamw_30_tensors(device: str, wrap: Wrap) -> Step:
    parameters = [nn.Parameter(randn(device, 64 * (1 + i % 5), 256)) for i in range(30)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    return wrap(optimizer.step)


@workload("chain")
def black_scholes(device: str, wrap: Wrap) -> Step:
    price, strike, years = (torch.rand(200_000).add(0.5).to(device) for _ in range(3))

    def call_and_put(s: torch.Tensor, k: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate, sigma = 0.02, 0.3
        d1 = (torch.log(s / k) + (rate + sigma**2 / 2) * t) / (sigma * torch.sqrt(t))
        d2 = d1 - sigma * torch.sqrt(t)
        n1, n2 = (0.5 * (1 + torch.erf(d / math.sqrt(2))) for d in (d1, d2))
        discount = k * torch.exp(-rate * t)
        call = s * n1 - discount * n2
        return call, call + discount - s

    f = wrap(call_and_put)
    return lambda: f(price, strike, years)


@workload("chain")
def stencil_loop(device: str, wrap: Wrap) -> Step:
    grid = randn(device, 514, 514)

    def sweep(u: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            inner = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
            u = F.pad(inner, (1, 1, 1, 1))
        return u

    f = wrap(sweep)
    return lambda: f(grid)


# Loops of calls on tiny tensors ----------------------------------------------------------------------------------


@workload("tiny")
def python_lstm_loop(device: str, wrap: Wrap) -> Step:
    x, hidden = randn(device, 24, 8, 64), 64
    w, u, b = randn(device, 64, 4 * hidden), randn(device, hidden, 4 * hidden), randn(device, 4 * hidden)

    def lstm(x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[1], hidden, device=x.device)
        for t in range(x.shape[0]):
            i, f, g, o = (x[t] @ w + h @ u + b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h

    f = wrap(lstm)
    return lambda: f(x)


@workload("tiny")
def small_mlp_training(device: str, wrap: Wrap) -> Step:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    x, y = randn(device, 32, 16), randn(device, 32, 1)
    return training(model, wrap, lambda x, y: F.mse_loss(model(x), y), x, y)


# Models ----------------------------------------------------------------------------------------------------------


@workload("model")
def gpt_training(device: str, wrap: Wrap) -> Step:
    model = GPT().to(device)
    tokens = torch.randint(0, 256, (8, 129)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss_of = wrap(lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@workload("model")
def gpt_decoding(device: str, wrap: Wrap) -> Step:
    """One token with a cache of keys and values."""
    width, heads, past = 384, 6, 96
    blocks = nn.ModuleList([Block(width, heads) for _ in range(4)]).to(device).eval()
    cache = [[randn(device, 1, heads, past, width // heads) for _ in range(2)] for _ in blocks]
    x = randn(device, 1, 1, width)

    def decode(x: torch.Tensor) -> torch.Tensor:
        for block, (keys, values) in zip(blocks, cache):
            q, k, v = block.qkv(block.norm1(x)).view(1, 1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            x = x + block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 1, width))
            x = x + block.mlp(block.norm2(x))
        return x

    f = wrap(decode)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return f(x)

    return step


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 3 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
        self.body = nn.Sequential(*[_Residual(*w) for w in widths], _Residual(512, 512, 1))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(F.max_pool2d(self.stem(x), 3, 2, 1))
        return self.head(x.mean((2, 3)))


@workload("model")
def resnet18_training(device: str, wrap: Wrap) -> Step:
    model = ResNet18().to(device)
    x, y = randn(device, 8, 3, 96, 96), torch.randint(0, 10, (8,)).to(device)
    return training(model, wrap, lambda x, y: F.cross_entropy(model(x), y), x, y)


class _Encoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList([layer] + [type(layer)(width, heads, 4 * width, activation="gelu", batch_first=True)
                                               for _ in range(layers - 1)])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@workload("model")
def vit_inference(device: str, wrap: Wrap) -> Step:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 192, 16, 16), nn.Linear(192, 100)
            self.position, self.encoder = nn.Parameter(torch.zeros(196, 192)), _Encoder(192, 3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2) + self.position
            return self.head(self.encoder(x).mean(1))

    return inference(ViT().to(device), wrap, randn(device, 4, 3, 224, 224))


@workload("model")
def bert_inference(device: str, wrap: Wrap) -> Step:
    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(1000, 256), nn.Parameter(torch.zeros(128, 256))
            self.norm, self.encoder, self.head = nn.LayerNorm(256), _Encoder(256, 4, 4), nn.Linear(256, 1000)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.norm(self.token(tokens) + self.position)))

    return inference(Bert().to(device), wrap, torch.randint(0, 1000, (4, 128)).to(device))


@workload("model")
def speech_conv1d(device: str, wrap: Wrap) -> Step:
    layers: list[nn.Module] = [nn.Conv1d(40, 128, 5, 2, 2)]
    for _ in range(4):
        layers += [nn.BatchNorm1d(128), nn.GELU(), nn.Conv1d(128, 128, 5, 1, 2, groups=4)]
    model = nn.Sequential(*layers, nn.GELU(), nn.Conv1d(128, 32, 1)).to(device)
    return inference(model, wrap, randn(device, 8, 40, 400))


@workload("model")
def recommender_training(device: str, wrap: Wrap) -> Step:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(1000, 16) for _ in range(8)])
            self.mlp = nn.Sequential(nn.Linear(141, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            columns = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            return self.mlp(torch.cat([dense, *columns], 1)).squeeze(1)

    model = Recommender().to(device)
    dense, ids = randn(device, 512, 13), torch.randint(0, 1000, (512, 8)).to(device)
    clicks = torch.randint(0, 2, (512,)).float().to(device)
    loss_of = lambda d, i, c: F.binary_cross_entropy_with_logits(model(d, i), c)  # noqa: E731
    return training(model, wrap, loss_of, dense, ids, clicks)


@workload("model")
def unet_block(device: str, wrap: Wrap) -> Step:
    class UNetBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, 1, 1)
            self.time, self.norm2, self.conv2 = nn.Linear(128, 64), nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, 1, 1)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
            h = self.conv2(F.silu(self.norm2(h))) + x
            return F.interpolate(h, scale_factor=2.0)

    return inference(UNetBlock().to(device), wrap, randn(device, 4, 64, 32, 32), randn(device, 4, 128))


@workload("model")
def message_passing(device: str, wrap: Wrap) -> Step:
    nodes, edges, width = 2000, 16000, 64
    source, target = (torch.randint(0, nodes, (edges,)).to(device) for _ in range(2))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            m = F.relu(self.message(torch.cat([x[source], x[target]], 1)))
            received = torch.zeros_like(x).index_add_(0, target, m)
            return F.relu(self.update(torch.cat([x, received], 1)))

    model = nn.Sequential(Layer(), Layer()).to(device)
    return inference(model, wrap, randn(device, nodes, width))
