// Padding with a number: PyTorch fills the whole result and copies the tensor over most of it. Here the borders alone
// are filled, as views, so that what is recorded writes each element once.
#include <ATen/ops/constant_pad_nd_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "factories.h"

namespace neuron {

namespace {

using at::Tensor;

constexpr int64_t kWorthBorders = 1 << 14;  // elements; below, more calls cost more than they save

Tensor constant_pad_nd(const Tensor& self, c10::SymIntArrayRef symbolic, const at::Scalar& value) {
  const c10::IntArrayRef pad = C10_AS_INTARRAYREF_SLOW(symbolic);
  const auto dims = static_cast<int64_t>(pad.size()) / 2, first = self.dim() - dims;
  if (pad.empty() || pad.size() % 2 || first < 0 || self.numel() < kWorthBorders || *std::ranges::min_element(pad) < 0)
    return at::compositeexplicitautograd::constant_pad_nd_symint(self, symbolic, value);  // words the errors, too
  std::vector<int64_t> sizes = self.sizes().vec();
  for (int64_t i = 0; i < dims; i++) sizes[self.dim() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
  const Tensor result = at::empty(sizes, self.options().memory_format(self.suggest_memory_format()));
  Tensor inner = result;
  for (int64_t dim = first; dim < self.dim(); dim++) {
    const int64_t before = pad[2 * (self.dim() - 1 - dim)], size = self.size(dim), end = before + size;
    if (before) inner.narrow(dim, 0, before).fill_(value);
    if (end < inner.size(dim)) inner.narrow(dim, end, inner.size(dim) - end).fill_(value);
    inner = inner.narrow(dim, before, size);
  }
  inner.copy_(self);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("constant_pad_nd", TORCH_FN(constant_pad_nd)); }

}  // namespace neuron
