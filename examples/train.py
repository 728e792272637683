"""Trains a model on any device of PyTorch: `python examples/train.py --task gpt --device neuron`.

Tasks:
  gpt      a character-level GPT on Python's language reference; writes some text when it is done
  digits   a convolutional network on scikit-learn's handwritten digits; tells its accuracy

The same seed gives the same initial weights and the same batches on every device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import digits
import gpt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
# The host reads the losses once in so many steps: reading waits for the device.
READ_EVERY = 10


class Trainer:
    """The training loop, and what it saw: losses and seconds."""

    def __init__(self, name: str, device: torch.device, model: nn.Module, learning_rate: float, steps: int) -> None:
        self.name, self.device, self.steps = name, device, steps
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.schedule = OneCycleLR(self.optimizer, learning_rate, total_steps=steps, pct_start=0.1)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # for each READ_EVERY steps

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, -2), targets.to(self.device).flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def run(self, batches: Batches) -> None:
        self.model.train()
        with tqdm(total=self.steps, desc=f"{self.name} on {self.device}", unit="step") as bar:
            while len(self.losses) < self.steps:
                start = time.perf_counter()
                count = min(READ_EVERY, self.steps - len(self.losses))
                pending = [self.step(*next(batches)) for _ in range(count)]
                self.losses += torch.stack(pending).tolist()
                self.seconds.append(time.perf_counter() - start)
                bar.update(count)
                bar.set_postfix(loss=f"{self.losses[-1]:.3f}")

    def result(self, samples_per_step: int, unit: str, **more: Any) -> dict[str, Any]:
        # The first steps warm up: memory, threads, caches.
        typical = sorted(self.seconds[1:] or self.seconds)[len(self.seconds[1:]) // 2]
        return {
            "task": self.name,
            "device": str(self.device),
            "losses": self.losses,
            "seconds": sum(self.seconds),
            "throughput": samples_per_step * min(READ_EVERY, self.steps) / typical,
            "unit": unit,
            **more,
        }


def train_gpt(device: torch.device, seed: int, steps: int = 300, batch: int = 16) -> dict[str, Any]:
    text, size = gpt.Text(), gpt.Size()
    torch.manual_seed(seed)
    trainer = Trainer("gpt", device, gpt.GPT(len(text.characters), size), learning_rate=3e-3, steps=steps)
    generator = torch.Generator().manual_seed(seed)
    trainer.run(iter(lambda: gpt.windows(text.train, batch, size.length, generator), None))

    model = trainer.model.eval()
    with torch.no_grad():
        inputs, targets = (t.to(device) for t in gpt.windows(text.validation, 4 * batch, size.length, generator))
        validation = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).item()
    sample = text.decode(model.sample(text.encode("The statement ").to(device), 400))
    return trainer.result(batch * size.length, "tokens/s", validation_loss=validation, sample=sample)


def train_digits(device: torch.device, seed: int, steps: int = 330, batch: int = 64) -> dict[str, Any]:
    x, y, test_x, test_y = digits.images()
    torch.manual_seed(seed)
    trainer = Trainer("digits", device, digits.Network(), learning_rate=1e-2, steps=steps)
    generator = torch.Generator().manual_seed(seed)

    def batches() -> Batches:
        while True:
            for index in torch.randperm(len(x), generator=generator).split(batch)[: len(x) // batch]:
                yield x[index], y[index]

    trainer.run(batches())
    with torch.no_grad():
        guess = trainer.model.eval()(test_x.to(device)).argmax(dim=1)
        accuracy = (guess == test_y.to(device)).float().mean().item()
    return trainer.result(batch, "images/s", accuracy=accuracy)


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"gpt": train_gpt, "digits": train_digits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator() or "cpu"), help="%(default)s")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--batch", type=int, help="samples in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for losses and throughput")
    args = parser.parse_args()

    chosen = {name: getattr(args, name) for name in ("steps", "batch") if getattr(args, name)}
    result = TASKS[args.task](torch.device(args.device), args.seed, **chosen)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result))
    for name in ("validation_loss", "accuracy"):
        if name in result:
            print(f"{name.replace('_', ' ')}: {result[name]:.4f}")
    print(f"{result['throughput']:,.0f} {result['unit']}")
    if "sample" in result:
        print(f"\n{result['sample']}")


if __name__ == "__main__":
    main()
