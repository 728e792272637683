"""A character-level GPT on the English text that ships with Python, its language reference."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F


class Text:
    """The text as numbers: one for each character, split into a training and a validation part."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        self._index = {c: i for i, c in enumerate(self.characters)}
        data = self.encode(text)
        split = len(data) * 9 // 10
        self.train, self.validation = data[:split], data[split:]

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self._index[c] for c in text])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


def windows(
    data: torch.Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`batch` random pieces of `data`, and the same pieces moved by one character: what is to be predicted."""
    starts = torch.randint(len(data) - length - 1, (batch, 1), generator=generator)
    index = starts + torch.arange(length)
    return data[index], data[index + 1]


@dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 128


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.length = size.length
        self.token = nn.Embedding(vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))

    @torch.no_grad()
    def sample(self, prompt: torch.Tensor, count: int, temperature: float = 0.8) -> torch.Tensor:
        """Continues `prompt` by `count` tokens."""
        tokens = prompt[None]
        for _ in range(count):
            logits = self(tokens[:, -self.length :])[:, -1]
            choice = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            tokens = torch.cat([tokens, choice], dim=1)
        return tokens[0]
