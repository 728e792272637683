"""Random programs of PyTorch calls, run with fusion on and off in separate processes: every bit must be the same.

    python tests/fusion/programs.py --count 100000          run programs 0 ... 99999, print the coverage
    python tests/fusion/programs.py --first 4711 --count 1 --show      print program 4711 as it runs

A program is made from its number alone and looks only at shapes and data types, so both processes make the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

DEVICE = "neuron"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]
SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, 3e38, 1.0, -1.0, 0.5]

# Calls of one tensor; a name "nn.x" is torch.nn.functional.x.
UNARY_FLOAT = """abs neg sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf floor ceil
round trunc frac sign square atan sinh cosh asinh nan_to_num nn.relu nn.gelu nn.silu nn.mish nn.softplus nn.hardtanh
nn.hardswish nn.hardsigmoid nn.elu nn.leaky_relu nn.logsigmoid nn.relu6 nn.selu nn.celu nn.softsign nn.tanhshrink
isnan isinf isfinite logical_not""".split()
UNARY_INTEGER = "abs neg sign square bitwise_not logical_not".split()
UNARY_BOOL = "logical_not bitwise_not".split()
BINARY_FLOAT = """add sub mul div maximum minimum fmax fmin eq ne lt le gt ge atan2 copysign fmod remainder pow hypot
logical_and logical_or logical_xor""".split()
BINARY_INTEGER = """add sub mul div maximum minimum eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor
logical_and logical_or""".split()
BINARY_BOOL = "add mul bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor eq ne".split()
SCALAR_FLOAT = "add sub mul div pow maximum eq ne lt le gt ge clamp_min clamp_max fmod remainder".split()
SCALAR_INTEGER = "add sub mul eq ne lt le gt ge clamp_min clamp_max".split()
IN_PLACE_FLOAT = """add_ sub_ mul_ div_ copy_ fill_ zero_ clamp_ relu_ sigmoid_ tanh_ exp_ neg_ abs_ sqrt_ addcmul_
addcdiv_ lerp_ masked_fill_""".split()
IN_PLACE_INTEGER = "add_ sub_ mul_ copy_ fill_ zero_ clamp_ neg_ abs_ masked_fill_".split()
REDUCTIONS = "sum mean amax amin prod var std norm any all argmax logsumexp".split()
ROWS = "softmax log_softmax layer_norm rms_norm group_norm batch_norm".split()
LIBRARY = "matmul cumsum sort flip roll gather cat cat".split()
FOREACH = "add mul div sqrt neg lerp addcmul addcdiv".split()
OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"]


class Program:
    """One program: `run` returns the digests of what it leaves behind."""

    def __init__(self, number: int, coverage: Counter[str], show: bool = False) -> None:
        self.random = random.Random(number)
        self.number = number
        self.coverage = coverage
        self.show = show
        self.pool: list[torch.Tensor] = []
        self.digests: list[str] = []

    # What the program says ------------------------------------------------------------------------------------

    def note(self, name: str, *tensors: Any) -> None:
        """Counts a call by its name and the types of its tensors."""
        types = {str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, torch.Tensor)}
        for dtype in types:
            self.coverage[f"{name} {dtype}"] += 1
        if self.show:
            about = [f"{tuple(t.shape)}/{t.stride()} {t.dtype}" if isinstance(t, torch.Tensor) else t for t in tensors]
            print(name, *about, file=sys.stderr)

    def keep(self, result: Any) -> None:
        """Adds results to the pool, which forgets old ones: then nobody holds their storages any more."""
        for t in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(t, torch.Tensor) and t.numel() <= 1 << 16:
                self.pool.append(t)
        while len(self.pool) > 8:
            self.pool.pop(self.random.randrange(len(self.pool)))

    def put(self, t: torch.Tensor) -> None:
        """A digest of type, shape, strides and bytes."""
        host = t.detach().cpu().clone(memory_format=torch.contiguous_format)
        data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
        about = f"{host.dtype} {tuple(t.shape)} {t.stride()}".encode()
        self.digests.append(hashlib.blake2b(about + data, digest_size=8).hexdigest())

    # What it is made of ---------------------------------------------------------------------------------------

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        if dtype == torch.bool:
            host = torch.randint(0, 2, shape, generator=generator).bool()
        elif dtype in INTEGERS:
            host = torch.randint(-128, 128, shape, generator=generator).to(dtype)
        else:
            host = torch.randn(shape, generator=generator) * self.random.choice([0.1, 1, 1, 1, 30])
            if self.random.random() < 0.2 and host.numel():
                flat = host.view(-1)
                for _ in range(3):
                    flat[self.random.randrange(flat.numel())] = self.random.choice(SPECIAL)
            host = host.to(dtype)
        return host.to(DEVICE)

    def start(self) -> None:
        rows, columns = self.random.choice([1, 2, 3, 5, 8, 17]), self.random.choice([1, 2, 7, 16, 33, 64, 129])
        shapes = [(rows, columns), (rows, columns), (columns,), (rows, 1), (1,), (), (3, rows, columns)]
        if self.random.random() < 0.03:
            shapes.append((0, columns))
        for _ in range(self.random.randint(2, 4)):
            self.pool.append(self.tensor(self.random.choice(shapes), self.random.choice(self.favourites)))

    def pick(self, *dtypes: torch.dtype) -> torch.Tensor | None:
        found = [t for t in self.pool if not dtypes or t.dtype in dtypes]
        return self.random.choice(found) if found else None

    def partner(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor that `t` can be combined with."""

        def fits(o: torch.Tensor) -> bool:
            return all(a == b or 1 in (a, b) for a, b in zip(reversed(t.shape), reversed(o.shape)))

        found = [o for o in self.pool if fits(o) and (o.dtype == t.dtype or self.random.random() < 0.3)]
        if found and self.random.random() < 0.85:
            return self.random.choice(found)
        shape = self.random.choice([tuple(t.shape), tuple(t.shape[-1:]), ()])
        return self.tensor(shape, t.dtype)

    def scalar(self, dtype: torch.dtype) -> float | int:
        if dtype in INTEGERS or dtype == torch.bool:
            return self.random.randint(-5, 5)
        return self.random.choice([0.5, 2, 3, -1.25, 0.1, 1e-3, 100.0, self.random.uniform(-2, 2)])

    # Steps ----------------------------------------------------------------------------------------------------

    def unary(self) -> None:
        t = self.pick()
        names = UNARY_FLOAT if t.is_floating_point() else UNARY_BOOL if t.dtype == torch.bool else UNARY_INTEGER
        name = self.random.choice(names)
        self.note(name, t)
        f = getattr(F, name[3:]) if name.startswith("nn.") else getattr(torch, name)
        extra = {"approximate": "tanh"} if name == "nn.gelu" and self.random.random() < 0.5 else {}
        self.keep(f(t, **extra))

    def binary(self) -> None:
        t = self.pick()
        o = self.partner(t)
        if not t.is_floating_point() and not o.is_floating_point():
            names = BINARY_BOOL if torch.bool in (t.dtype, o.dtype) else BINARY_INTEGER
        else:
            names = BINARY_FLOAT
        name = self.random.choice(names)
        if name in ("add", "sub") and torch.bool not in (t.dtype, o.dtype) and self.random.random() < 0.3:
            self.note(name, t, o)
            return self.keep(getattr(torch, name)(t, o, alpha=self.scalar(torch.int8)))
        if name == "div" and self.random.random() < 0.3 and t.dtype != torch.bool:
            if not t.is_floating_point() and not o.is_floating_point():
                o = o | 1  # never 0
            self.note("div_rounded", t, o)
            return self.keep(torch.div(t, o, rounding_mode=self.random.choice(["floor", "trunc"])))
        self.note(name, t, o)
        self.keep(getattr(torch, name)(t, o))

    def with_scalar(self) -> None:
        t = self.pick(*FLOATS, *INTEGERS)
        if t is None:
            return
        name = self.random.choice(SCALAR_FLOAT if t.is_floating_point() else SCALAR_INTEGER)
        value = self.scalar(t.dtype)
        self.note(f"{name}_scalar", t)
        if name == "maximum":
            return self.keep(t.clamp(min=-abs(value), max=abs(value)))
        if name in ("add", "mul", "sub") and self.random.random() < 0.3:  # the number first
            swapped: Callable[[Any], Any] = {
                "add": lambda x: value + x,
                "mul": lambda x: value * x,
                "sub": lambda x: value - x,
            }[name]
            return self.keep(swapped(t))
        self.keep(getattr(torch, name)(t, value))

    def select(self) -> None:
        t = self.pick()
        mask = self.pick(torch.bool)
        if mask is None or not self._broadcasts(mask, t):
            mask = self.tensor(tuple(t.shape), torch.bool)
        if self.random.random() < 0.5:
            o = self.partner(t)
            self.note("where", t, o)
            if self._broadcasts(mask, o):
                self.keep(torch.where(mask, t, o))
        else:
            self.note("masked_fill", t)
            self.keep(t.masked_fill(mask, self.scalar(t.dtype)))

    @staticmethod
    def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
        return all(x == y or 1 in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape)))

    def cast(self) -> None:
        t = self.pick()
        to = self.random.choice(DTYPES)
        self.note(f"to_{str(to).removeprefix('torch.')}", t)
        if t.is_floating_point() and not to.is_floating_point and to != torch.bool:
            t = t.nan_to_num(0, 0, 0).clamp(-100, 100)  # out of range is undefined in C++
        self.keep(t.to(to))

    def ternary(self) -> None:
        t = self.pick(*FLOATS)
        if t is None:
            return
        a, b = (self.tensor(tuple(t.shape), t.dtype) for _ in range(2))
        name = self.random.choice(["addcmul", "addcdiv", "lerp", "clamp"])
        self.note(name, t)
        if name == "lerp":
            return self.keep(t.lerp(a, self.scalar(t.dtype)) if self.random.random() < 0.5 else t.lerp(a, b))
        if name == "clamp":
            return self.keep(t.clamp(a, b))
        self.keep(getattr(torch, name)(t, a, b, value=self.scalar(t.dtype)))

    def view(self) -> None:
        t = self.pick()
        n = t.dim()
        options: list[Callable[[], torch.Tensor]] = [lambda: t.unsqueeze(self.random.randint(0, n)), lambda: t.view(-1)]
        if n:
            d = self.random.randrange(n)
            size = t.shape[d]
            options += [lambda: t.transpose(d, self.random.randrange(n)), lambda: t.flatten(),
                        lambda: t.expand(2, *t.shape)]  # fmt: skip
            if size > 1:
                a = self.random.randrange(size)
                options += [
                    lambda: t.narrow(d, a, self.random.randint(1, size - a)),
                    lambda: t.select(d, a),
                    lambda: t.chunk(2, d)[self.random.randrange(2)],
                    lambda: t.movedim(d, 0)[:: self.random.choice([2, 3])],
                ]
        if n >= 2:
            options += [lambda: t.t() if n == 2 else t.mT, lambda: t.diagonal()]
        try:
            result = self.random.choice(options)()
        except RuntimeError:  # a view that the strides do not allow
            return
        self.note("view", t)
        if result.numel() <= 1 << 14:
            self.keep(result)

    def in_place(self) -> None:
        t = self.pick(*FLOATS, *INTEGERS)
        if t is None or t.requires_grad:
            return
        if self.random.random() < 0.35 and t.dim() and t.shape[0] > 2:  # a part of it, or a shifted copy of itself
            n = t.shape[0]
            if self.random.random() < 0.5:
                self.note("overlap_add_", t)
                t[1:] += t[:-1]
                return
            t = t[self.random.randrange(n - 1) :: self.random.choice([1, 2])]
        if any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)):
            return  # an expanded tensor cannot be written
        name = self.random.choice(IN_PLACE_FLOAT if t.is_floating_point() else IN_PLACE_INTEGER)
        self.note(name, t)
        other = self.pick(t.dtype)
        if not self._broadcasts(other, t) or torch.broadcast_shapes(other.shape, t.shape) != t.shape:
            other = self.tensor(tuple(t.shape), t.dtype)
        if other.data_ptr() != t.data_ptr() and other.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
            other = other.clone()  # partly overlapping operands are an error of the caller
        operand = other if self.random.random() < 0.6 else self.scalar(t.dtype)
        method = getattr(t, name)
        if name == "copy_":
            method(other)
        elif name == "fill_":
            method(self.scalar(t.dtype))
        elif name == "clamp_":
            method(-3, 3)
        elif name == "masked_fill_":
            method(self.tensor(tuple(t.shape), torch.bool), self.scalar(t.dtype))
        elif name in ("addcmul_", "addcdiv_"):
            method(self.tensor(tuple(t.shape), t.dtype), self.tensor(tuple(t.shape), t.dtype), value=0.5)
        elif name == "lerp_":
            method(self.tensor(tuple(t.shape), t.dtype), 0.25)
        elif name in ("add_", "sub_", "mul_", "div_"):
            method(operand)
        else:
            method()

    def out(self) -> None:
        t = self.pick(*FLOATS)
        if t is None:
            return
        name = self.random.choice(["add", "mul", "exp", "sigmoid", "div"])
        target = torch.empty(self.random.choice([tuple(t.shape), (0,)]), dtype=t.dtype, device=DEVICE)
        self.note(f"{name}_out", t)
        args = (t,) if name in ("exp", "sigmoid") else (t, self.tensor(tuple(t.shape), t.dtype))
        self.keep(getattr(torch, name)(*args, out=target))

    def reduce(self) -> None:
        t = self.pick(*FLOATS, *INTEGERS)
        if t is None or not t.dim() or not t.numel():
            return
        name = self.random.choice(REDUCTIONS)
        if not t.is_floating_point() and name in ("mean", "var", "std", "norm", "logsumexp"):
            name = "sum"
        self.note(name, t)
        if self.random.random() < 0.3 and name in ("sum", "mean", "amax", "amin", "any", "all", "norm"):
            return self.keep(getattr(torch, name)(t))
        d: int | tuple[int, ...] = -1 if self.random.random() < 0.5 else self.random.randrange(t.dim())
        if name in ("sum", "mean", "amax", "amin", "norm") and t.dim() > 2 and self.random.random() < 0.3:
            d = (0, 1)
        result = getattr(torch, name)(t, dim=d, keepdim=self.random.random() < 0.5)
        self.keep(result)

    def row(self) -> None:
        t = self.pick(*FLOATS)
        if t is None or not t.dim() or not t.numel():
            return
        name = self.random.choice(ROWS)
        self.note(name, t)
        n = t.shape[-1]
        if name in ("softmax", "log_softmax"):
            d = -1 if self.random.random() < 0.8 else 0
            return self.keep(getattr(torch, name)(t, d))
        weight = self.tensor((n,), t.dtype)
        if name in ("group_norm", "batch_norm"):
            x = self.tensor((2, 4, n), t.dtype)
            w, b = (self.tensor((4,), t.dtype) for _ in range(2))
            if name == "batch_norm":
                return self.keep(F.batch_norm(x, b, w.abs() + 0.1, w, b).relu())
            leaves = [p.requires_grad_() for p in (x, w, b)]
            result = F.group_norm(x, 2, w, b)
            return self.keep([result.detach(), *torch.autograd.grad(result.sum(), leaves)])
        if name == "rms_norm":
            return self.keep(F.rms_norm(t, (n,), weight))
        self.keep(F.layer_norm(t, (n,), weight, self.tensor((n,), t.dtype)))

    def loss(self) -> None:
        """Cross entropy, alone and with gradients."""
        t = self.pick(*FLOATS)
        if t is None or t.dim() != 2 or not t.numel():
            t = self.tensor((self.random.choice([1, 5, 40]), self.random.choice([2, 7, 300])), torch.float32)
        samples, classes = t.shape
        labels = [self.random.choice([self.random.randrange(classes), -100]) for _ in range(samples)]
        target = torch.tensor(labels, device=DEVICE)
        reduction = self.random.choice(["mean", "sum", "none"])
        name = self.random.choice(["cross_entropy", "nll_loss"])
        self.note(f"{name}_{reduction}", t)
        x = t.detach().requires_grad_()
        if self.random.random() < 0.3 and reduction != "none":
            self.note(f"binary_cross_entropy_{reduction}", t)
            result = F.binary_cross_entropy_with_logits(x * 2, t.sigmoid(), reduction=reduction)
        else:
            result = getattr(F, name)(x * 2, target, reduction=reduction)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        self.keep([result.detach(), gradient])

    def draw(self) -> None:
        t = self.pick(*FLOATS)
        if t is None:
            return
        name = self.random.choice(
            ["dropout", "rand_like", "randn_like", "bernoulli", "uniform_", "normal_", "bernoulli_"]
        )
        self.note(name, t)
        if name.endswith("_"):
            arguments = {"uniform_": (-1, 2), "normal_": (1, 2), "bernoulli_": (0.3,)}[name]
            fresh = torch.empty_like(t)
            return self.keep(getattr(fresh[..., ::2] if fresh.dim() else fresh, name)(*arguments))
        if name == "dropout":
            return self.keep(F.dropout(t, self.random.choice([0.1, 0.5]), True))
        if name == "bernoulli":
            return self.keep(torch.full_like(t, 0.3).bernoulli())
        self.keep(getattr(torch, name)(t))

    def make(self) -> None:
        shape, dtype = tuple(self.pick().shape), self.random.choice(DTYPES)
        name = self.random.choice(["zeros", "ones", "full", "arange", "clone", "contiguous"])
        t = self.pick()
        self.note(name, t)
        if name in ("zeros", "ones"):
            return self.keep(getattr(torch, name)(shape, dtype=dtype, device=DEVICE))
        if name == "full":
            return self.keep(torch.full(shape, 1 if dtype == torch.bool else 3, dtype=dtype, device=DEVICE))
        if name == "arange":
            return self.keep(torch.arange(self.random.randint(1, 40), device=DEVICE, dtype=torch.float32))
        self.keep(t.clone() if name == "clone" else t.contiguous())

    def library(self) -> None:
        t = self.pick(*FLOATS)
        if t is None or not t.dim() or not t.numel():
            return
        name = self.random.choice(LIBRARY)
        self.note(name, t)
        if name == "matmul":
            return self.keep(t @ self.tensor((t.shape[-1], self.random.choice([1, 8])), t.dtype))
        if name == "gather":
            index = torch.zeros(t.shape, dtype=torch.int64, device=DEVICE)
            return self.keep(t.gather(-1, index))
        if name == "cat":
            dim = self.random.randrange(t.dim())
            parts = [t, t * 2, t.narrow(dim, 0, self.random.randint(1, t.shape[dim]))]
            return self.keep(torch.cat(self.random.sample(parts, self.random.randint(1, 3)), dim))
        extra = {"cumsum": (-1,), "sort": (), "flip": ((-1,),), "roll": (1, 0)}[name]
        self.keep(getattr(torch, name)(t, *extra))

    def read(self) -> None:
        t = self.pick(*FLOATS)
        if t is None or not t.numel():
            return
        self.note("item", t)
        value = t.reshape(-1)[0].item()
        if value == value and abs(value) < 1e3:
            self.keep(t + value)

    def foreach(self) -> None:
        dtype = self.random.choice(FLOATS)
        a, b, c = ([self.tensor((n, 3), dtype) for n in (1, 4, 9)] for _ in range(3))
        name = self.random.choice(FOREACH)
        self.note(f"foreach_{name}", *a)
        suffix = self.random.choice(["", "_"])
        f = getattr(torch, f"_foreach_{name}{suffix}")
        args = {"sqrt": (), "neg": (), "lerp": (b, 0.3), "addcmul": (b, c), "addcdiv": (b, c)}.get(name, (b,))
        if name in ("add", "mul") and self.random.random() < 0.4:
            args = (self.scalar(dtype),)
        result = f(a, *args)
        self.keep(a if suffix else result)

    def optimize(self) -> None:
        name = self.random.choice(OPTIMIZERS)
        dtype = self.random.choice([torch.float32, torch.float32, torch.bfloat16])
        parameters = [torch.nn.Parameter(self.tensor(s, dtype)) for s in ((5, 3), (7,), (1,))]
        kinds: list[dict[str, bool]] = [{}, {"foreach": False}]
        if name in ("SGD", "Adam", "AdamW"):
            kinds.append({"fused": True})
        extra = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        self.note(name, *parameters)
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=0.01, **extra,
                                               **self.random.choice(kinds))  # fmt: skip
        for _ in range(2):
            for p in parameters:
                p.grad = self.tensor(tuple(p.shape), dtype)
            optimizer.step()
        self.keep([p.detach() for p in parameters])

    def differentiate(self) -> None:
        """Gradients of a program of a few differentiable calls."""
        leaf = self.pick(*FLOATS)
        if leaf is None or not leaf.numel() or not leaf.dim():
            return
        leaf = leaf.detach().clone().requires_grad_()
        leaves = [leaf]
        x = leaf
        for _ in range(self.random.randint(2, 6)):
            name = self.random.choice("sigmoid tanh gelu silu relu mul add softmax log_softmax layer_norm rms_norm exp pow mean "
                                      "where dropout leaky_relu elu softplus amax transpose slice".split())  # fmt: skip
            self.note(f"grad_{name}", x)
            if name in ("sigmoid", "tanh", "exp"):
                x = getattr(torch, name)(x)
            elif name in ("gelu", "silu", "relu", "leaky_relu", "elu", "softplus"):
                x = getattr(F, name)(x)
            elif name in ("mul", "add"):
                x = getattr(torch, name)(x, self.tensor(tuple(x.shape[-1:]), x.dtype))
            elif name in ("softmax", "log_softmax"):
                x = getattr(torch, name)(x, -1) if x.dim() else x
            elif name == "layer_norm":
                w, b = (self.tensor(tuple(x.shape[-1:]), x.dtype).requires_grad_() for _ in range(2))
                leaves += [w, b] if x.dim() else []
                x = F.layer_norm(x, x.shape[-1:], w, b) if x.dim() else x
            elif name == "rms_norm":
                w = self.tensor(tuple(x.shape[-1:]), x.dtype).requires_grad_()
                leaves += [w] if x.dim() else []
                x = F.rms_norm(x, x.shape[-1:], w) if x.dim() else x
            elif name == "pow":
                x = x.pow(2)
            elif name in ("mean", "amax"):
                x = x * getattr(x, name)(-1, keepdim=True) if x.dim() else x
            elif name == "where":
                x = torch.where(self.tensor(tuple(x.shape), torch.bool), x, -x)
            elif name == "dropout":
                x = F.dropout(x, 0.3, True)
            elif name == "transpose":
                x = x.mT if x.dim() > 1 else x
            elif x.dim() and x.shape[0] > 1:
                x = x[1:]
        gradients = torch.autograd.grad((x.float() ** 2).sum(), leaves)
        self.keep([x.detach(), *gradients])

    def overwrite(self) -> None:
        """What was read of a tensor is used after it, and what it was overwritten with, have changed."""
        t, dtype = self.pick(*FLOATS, *INTEGERS), self.random.choice([torch.float32, torch.int32])
        if t is None or any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)):
            return
        self.note("overwrite", t)
        other = self.tensor(tuple(t.shape), t.dtype)
        before = t.to(dtype)
        t.copy_(other)
        other.fill_(1)
        self.keep([-before, other])

    def side_stream(self) -> None:
        t = self.pick(*FLOATS)
        if t is None:
            return
        self.note("side_stream", t)
        stream = torch.Stream(DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            result = (t * 2 + 1).relu()
        torch.accelerator.current_stream().wait_stream(stream)
        self.keep(result * t)

    STEPS = [
        (unary, 14), (binary, 18), (with_scalar, 12), (select, 6), (cast, 7), (ternary, 5), (view, 12), (in_place, 14),
        (out, 2), (reduce, 7), (row, 6), (loss, 2), (draw, 3), (make, 4), (library, 3), (read, 1), (foreach, 2), (optimize, 1),
        (differentiate, 4), (side_stream, 1), (overwrite, 3),
    ]  # fmt: skip

    def steps(self) -> None:
        steps, weights = zip(*self.STEPS)
        for step in self.random.choices(steps, weights, k=self.random.randint(4, 24)):
            try:
                step(self)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                self.digests.append(type(error).__name__)
            if self.random.random() < 0.05:
                self.put(self.pick())
        for t in self.pool:
            self.put(t)

    def run(self) -> list[str]:
        """The digests, in the program's order."""
        torch.manual_seed(self.number)
        # A few types a program: else few calls would find a partner.
        self.favourites = self.random.choices(DTYPES, weights=[4, 3, 3, 2, 2, 2], k=2)
        self.start()
        if self.random.random() < 0.06:  # two threads, each with its own half of the pool
            other = Program(self.number + (1 << 40), self.coverage, self.show)
            other.favourites = self.favourites
            other.start()
            other.STEPS = self.STEPS = [s for s in self.STEPS if s[0].__name__ not in ("draw", "differentiate")]
            thread = threading.Thread(target=other.steps)
            thread.start()
            self.steps()
            thread.join()
            return self.digests + other.digests
        self.steps()
        return self.digests


def worker(first: int, count: int, show: bool) -> None:
    """Prints the digests of each program as a line, and the coverage as the last one."""
    torch.set_num_threads(1)
    coverage: Counter[str] = Counter()
    for number in range(first, first + count):
        print(json.dumps([number, Program(number, coverage, show).run()]), flush=number % 50 == 0)
    print(json.dumps(["coverage", coverage]), flush=True)


def start(fusion: str, first: int, count: int, show: bool) -> subprocess.Popen[str]:
    """A process that runs the programs with fusion "0" or "1"."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--first", str(first), "--count", str(count)]
    environment = os.environ | {"TORCH_NEURON_FUSION": fusion, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command + ["--show"] * show, stdout=subprocess.PIPE, text=True, env=environment)


def compare(first: int, count: int, show: bool = False) -> tuple[list[int], Counter[str]]:
    """The programs whose digests differ, and how often each call ran in each type.

    Raises:
        RuntimeError: a process ended early; says at which program.
    """
    on, off = start("1", first, count, show), start("0", first, count, False)
    different: list[int] = []
    begun = shown = time.monotonic()
    for done in range(count + 1):
        lines = [p.stdout.readline() for p in (on, off)]
        for line, process, name in zip(lines, (on, off), ("on", "off")):
            if not line:
                raise RuntimeError(f"with fusion {name} the process ended with {process.wait()} after {done} programs")
        (number, a), (_, b) = (json.loads(line) for line in lines)
        if number == "coverage":
            return different, Counter(a)
        if a != b:
            different.append(number)
            print(f"program {number} differs in result {[x == y for x, y in zip(a, b)].index(False)}", flush=True)
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            rate = (done + 1) / (shown - begun)
            print(f"{done + 1} of {count}, {rate:.0f} a second, {len(different)} differ", file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", type=int, default=0, help="number of the first program")
    p.add_argument("--count", type=int, default=1000, help="how many programs")
    p.add_argument("--show", action="store_true", help="print each call")
    p.add_argument("--least", type=int, default=0, help="fail if a call ran less often than this in some type")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        worker(args.first, args.count, args.show)
        return 0
    different, coverage = compare(args.first, args.count, args.show)
    for what, times in sorted(coverage.items()):
        print(f"{times:8} {what}")
    fusible = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    rare = [what for what, times in coverage.items() if times < args.least and what.split()[-1] in fusible]
    print(f"{args.count} programs, {len(different)} differ; {len(coverage)} calls and types, {len(rare)} rare {rare}")
    return 1 if different or rare else 0


if __name__ == "__main__":
    sys.exit(main())
