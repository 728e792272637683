"""Speed of NKI kernels on the software NeuronCore against PyTorch's CPU operators and the same kernels in NumPy.

python benchmarks/nki_kernels.py [--threads 2] [--repeats 5]: one interleaved run, minima over repeats.
"""

import argparse
import math
import time

import numpy as np
import torch

import torchneuron.device  # noqa: F401 - the executor runs on torch's threads
import torchneuron.nki as nki
import torchneuron.nki.isa as nisa
import torchneuron.nki.language as nl


@nki.jit
def matmul(lhsT, rhs):
    """out[M, N] = lhsT[K, M].T @ rhs[K, N]; a stationary panel of K x 128 stays in SBUF."""
    k, m = lhsT.shape
    _, n = rhs.shape
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    for ni in range(n // 512):
        moving = []
        for ki in range(k // 128):
            b = nl.ndarray((128, 512), rhs.dtype)
            nisa.dma_copy(b, rhs[ki * 128 : (ki + 1) * 128, ni * 512 : (ni + 1) * 512])
            moving.append(b)
        for mi in range(m // 128):
            acc = nl.ndarray((128, 512), nl.float32, nl.psum)
            for ki in range(k // 128):
                a = nl.ndarray((128, 128), lhsT.dtype)
                nisa.dma_copy(a, lhsT[ki * 128 : (ki + 1) * 128, mi * 128 : (mi + 1) * 128])
                nisa.nc_matmul(acc, a, moving[ki])
            c = nl.ndarray((128, 512), nl.float32)
            nisa.tensor_copy(c, acc)
            nisa.dma_copy(out[mi * 128 : (mi + 1) * 128, ni * 512 : (ni + 1) * 512], c)
    return out


@nki.jit
def softmax(x):
    rows, cols = x.shape
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    for i in range(rows // 128):
        t, m, s = (nl.ndarray((128, w), nl.float32) for w in (cols, 1, 1))
        nisa.dma_copy(t, x[i * 128 : (i + 1) * 128])
        nisa.tensor_reduce(m, nl.maximum, t, 1, negate=True)
        nisa.activation_reduce(t, nl.exp, t, nl.add, s, bias=m)
        nisa.reciprocal(s, s)
        nisa.tensor_scalar(t, t, nl.multiply, s)
        nisa.dma_copy(out[i * 128 : (i + 1) * 128], t)
    return out


@nki.jit
def layer_norm(x, w, b):
    rows, cols = x.shape
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    weight, bias = nl.ndarray((128, cols), nl.float32), nl.ndarray((128, cols), nl.float32)
    nisa.dma_copy(weight, w.ap([[0, 128], [1, cols]]))
    nisa.dma_copy(bias, b.ap([[0, 128], [1, cols]]))
    for i in range(rows // 128):
        t, sq = nl.ndarray((128, cols), nl.float32), nl.ndarray((128, cols), nl.float32)
        mean, ss = nl.ndarray((128, 1), nl.float32), nl.ndarray((128, 1), nl.float32)
        nisa.dma_copy(t, x[i * 128 : (i + 1) * 128])
        nisa.tensor_reduce(mean, nl.add, t, 1)
        nisa.tensor_scalar(mean, mean, nl.multiply, 1.0 / cols)
        nisa.tensor_scalar(t, t, nl.subtract, mean)
        nisa.activation_reduce(sq, nl.square, t, nl.add, ss)
        nisa.tensor_scalar(ss, ss, nl.multiply, 1.0 / cols, op1=nl.add, operand1=1e-5)
        nisa.activation(ss, nl.rsqrt, ss)
        nisa.scalar_tensor_tensor(t, t, nl.multiply, ss, nl.multiply, weight)
        nisa.tensor_tensor(t, t, bias, nl.add)
        nisa.dma_copy(out[i * 128 : (i + 1) * 128], t)
    return out


@nki.jit
def flash_attention(q, k, v):
    """q, k [H, D, S] (head dimension on partitions), v [H, S, D], D <= 128; online softmax over keys, 512 at a time."""
    heads, d, s = q.shape
    out = nl.ndarray((heads, s, d), nl.float32, nl.shared_hbm)
    scale = 1.0 / math.sqrt(d)
    block = min(512, s)
    for h in range(heads):
        keys = nl.ndarray((d, s), q.dtype)
        nisa.dma_copy(keys, k[h])
        values = [nl.ndarray((128, d), q.dtype) for _ in range(s // 128)]
        for j, t in enumerate(values):
            nisa.dma_copy(t, v[h, j * 128 : (j + 1) * 128])
        for i in range(s // 128):
            query = nl.ndarray((d, 128), q.dtype)
            nisa.dma_copy(query, q[h, :, i * 128 : (i + 1) * 128])
            acc, total, top = (
                nl.zeros((128, d), nl.float32),
                nl.zeros((128, 1), nl.float32),
                nl.full((128, 1), -1e30, nl.float32),
            )
            for j in range(s // block):
                scores = nl.ndarray((128, block), nl.float32, nl.psum)
                nisa.nc_matmul(scores, query, keys[:, j * block : (j + 1) * block])
                highest, shift, factor, part = (nl.ndarray((128, 1), nl.float32) for _ in range(4))
                nisa.tensor_reduce(highest, nl.maximum, scores, 1)
                nisa.tensor_scalar(highest, highest, nl.multiply, scale)
                nisa.tensor_tensor(highest, highest, top, nl.maximum)
                nisa.tensor_tensor(factor, top, highest, nl.subtract)
                nisa.activation(factor, nl.exp, factor)
                nisa.tensor_copy(top, highest)
                nisa.tensor_scalar(shift, highest, nl.multiply, -1.0)
                p = nl.ndarray((128, block), nl.float32)
                nisa.activation_reduce(p, nl.exp, scores, nl.add, part, bias=shift, scale=scale)
                nisa.scalar_tensor_tensor(total, total, nl.multiply, factor, nl.add, part)
                product = nl.ndarray((128, d), nl.float32, nl.psum)
                for b in range(block // 128):
                    turned = nl.ndarray((128, 128), nl.float32, nl.psum)
                    nisa.nc_transpose(turned, p[:, b * 128 : (b + 1) * 128], nisa.engine.tensor)
                    pt = nl.ndarray((128, 128), nl.float32)
                    nisa.tensor_copy(pt, turned)
                    nisa.nc_matmul(product, pt, values[j * (block // 128) + b])
                nisa.scalar_tensor_tensor(acc, acc, nl.multiply, factor, nl.add, product)
            nisa.reciprocal(total, total)
            nisa.tensor_scalar(acc, acc, nl.multiply, total)
            nisa.dma_copy(out[h, i * 128 : (i + 1) * 128], acc)
    return out


# ---- the same kernels, instruction by instruction in NumPy ---------------------------------------------------------
def numpy_matmul(lhsT, rhs):
    k, m = lhsT.shape
    n = rhs.shape[1]
    out = np.empty((m, n), np.float32)
    for ni in range(n // 512):
        moving = [
            rhs[ki * 128 : (ki + 1) * 128, ni * 512 : (ni + 1) * 512].astype(np.float32) for ki in range(k // 128)
        ]
        for mi in range(m // 128):
            acc = np.zeros((128, 512), np.float32)
            for ki in range(k // 128):
                a = lhsT[ki * 128 : (ki + 1) * 128, mi * 128 : (mi + 1) * 128].astype(np.float32)
                acc += a.T @ moving[ki]
            out[mi * 128 : (mi + 1) * 128, ni * 512 : (ni + 1) * 512] = acc
    return out


def numpy_softmax(x):
    out = np.empty_like(x)
    for i in range(x.shape[0] // 128):
        t = x[i * 128 : (i + 1) * 128].astype(np.float32)
        m = -t.max(1, keepdims=True)
        t = np.exp(t + m)
        s = t.sum(1, keepdims=True)
        s = np.reciprocal(s)
        out[i * 128 : (i + 1) * 128] = t * s
    return out


def numpy_layer_norm(x, w, b):
    out = np.empty_like(x)
    for i in range(x.shape[0] // 128):
        t = x[i * 128 : (i + 1) * 128].astype(np.float32)
        t = t - t.sum(1, keepdims=True) * np.float32(1 / x.shape[1])
        sq = np.square(t)
        ss = sq.sum(1, keepdims=True) * np.float32(1 / x.shape[1]) + np.float32(1e-5)
        ss = 1 / np.sqrt(ss)
        t = t * ss * w
        out[i * 128 : (i + 1) * 128] = t + b
    return out


def numpy_flash_attention(q, k, v):
    heads, d, s = q.shape
    out = np.empty((heads, s, d), np.float32)
    scale, block = np.float32(1.0 / math.sqrt(d)), min(512, s)
    for h in range(heads):
        keys = k[h].copy()
        values = [v[h, j * 128 : (j + 1) * 128].copy() for j in range(s // 128)]
        for i in range(s // 128):
            query = q[h, :, i * 128 : (i + 1) * 128].copy()
            acc, total = np.zeros((128, d), np.float32), np.zeros((128, 1), np.float32)
            top = np.full((128, 1), -1e30, np.float32)
            for j in range(s // block):
                scores = query.T @ keys[:, j * block : (j + 1) * block]
                highest = np.maximum(scores.max(1, keepdims=True) * scale, top)
                factor = np.exp(top - highest)
                top = highest.copy()
                p = np.exp(scores * scale + highest * np.float32(-1))
                total = total * factor + p.sum(1, keepdims=True)
                product = np.zeros((128, d), np.float32)
                for b in range(block // 128):
                    turned = p[:, b * 128 : (b + 1) * 128].T.copy()
                    product += turned.copy().T @ values[j * (block // 128) + b]
                acc = acc * factor + product
            out[h, i * 128 : (i + 1) * 128] = acc * np.reciprocal(total)
    return out


def best(functions, repeats):
    """Minimum seconds of each function in steady state, runs interleaved. What is timed follows a call of its own, so
    that each function finds the caches as it leaves them, not as another one does."""
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, f in functions.items():
            f()
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - start)
    return {name: min(t) for name, t in times.items()}


def report(name, t):
    """One line: the time, and how many times PyTorch's and NumPy's."""
    numpy = f", NumPy takes {t['numpy'] / t['nki']:.1f} x" if "numpy" in t else ""
    print(f"{name}: nki {t['nki'] * 1e3:.2f} ms = {t['nki'] / t['torch']:.2f} x torch{numpy}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", type=int, default=2048, help="of the matmuls")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n = args.size
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        at = a.t().contiguous()
        atn, bn = (x.float().numpy().astype("float32" if dtype is torch.float32 else "bfloat16") for x in (at, b))
        sides = {
            "nki": lambda at=at, b=b: matmul(at, b),
            "torch": lambda a=a, b=b: torch.mm(a, b),
            "numpy": lambda at=atn, b=bn: numpy_matmul(at, b),
        }
        t = best(sides, args.repeats)
        report(f"matmul {n}^3 {dtype}", t)
        print(f"    nki {2 * n**3 / t['nki'] / 1e9:.0f} GFLOP/s = {t['torch'] / t['nki']:.0%} of torch's rate")
    x, w, b = torch.randn(2048, 2048), torch.randn(2048), torch.randn(2048)
    xn, wn, bn = x.numpy(), w.numpy(), b.numpy()
    sides = {"nki": lambda: softmax(x), "torch": lambda: x.softmax(1), "numpy": lambda: numpy_softmax(xn)}
    report("softmax 2048x2048", best(sides, args.repeats))
    sides = {
        "nki": lambda: layer_norm(x, w, b),
        "torch": lambda: torch.layer_norm(x, (2048,), w, b),
        "numpy": lambda: numpy_layer_norm(xn, wn, bn),
    }
    report("layer_norm 2048x2048", best(sides, args.repeats))
    q, k, v = (torch.randn(8, 1024, 64) for _ in range(3))
    qt, kt = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    sides = {
        "nki": lambda: flash_attention(qt, kt, v),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None]),
        "numpy": lambda: numpy_flash_attention(qt.numpy(), kt.numpy(), v.numpy()),
    }
    report("attention 8x1024x64", best(sides, args.repeats))


if __name__ == "__main__":
    main()
