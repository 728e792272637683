// Rule: element order. A node walks through its elements in the order of its result's memory, slow dims first, and a
// place is merged as far as its strides allow.
//
// Reason: a value is passed on inside a program by element number. Operators agree about the number of an element if
// they walk alike; in memory order, transposed and channels-last tensors are one contiguous run, and so is a tensor
// after a view.
#include "layout.h"

#include <algorithm>

namespace neuron::fusion {

namespace {

int64_t broadcast_stride(const at::Tensor& t, int dim, int ndim, int64_t size) {
  const int own = dim - (ndim - static_cast<int>(t.dim()));
  if (own < 0) return 0;
  return t.size(own) == 1 && size != 1 ? 0 : t.stride(own);
}

// TensorIterator's order of two dims: > 0 if `a` is slower than `b`, 0 if the operands do not say.
int slower(const Layout& l, int a, int b, at::ArrayRef<const at::Tensor*> operands) {
  for (const at::Tensor* t : operands) {
    const int64_t sa = broadcast_stride(*t, a, l.ndim, l.size[a]), sb = broadcast_stride(*t, b, l.ndim, l.size[b]);
    if (sa == 0 || sb == 0) continue;
    if (sa != sb) return sa > sb ? 1 : -1;
    if (l.size[a] > l.size[b]) return 1;
  }
  return 0;
}

}  // namespace

bool plan_layout(at::ArrayRef<const at::Tensor*> inputs, const at::Tensor& out, bool expand, Layout& l) {
  const at::Tensor* first = out.defined() ? &out : inputs.empty() ? nullptr : inputs[0];
  bool flat = first && first->is_contiguous();
  for (const at::Tensor* t : inputs) flat = flat && t->sizes() == first->sizes() && t->is_contiguous();
  l.ndim = static_cast<int>(first->dim());
  for (const at::Tensor* t : inputs) l.ndim = std::max(l.ndim, static_cast<int>(t->dim()));
  if (l.ndim > kMaxDims) return false;
  if (flat) {
    l.flat = true;
    std::copy(first->sizes().begin(), first->sizes().end(), l.size);
    l.elements = first->numel();
    return true;
  }
  std::fill(l.size, l.size + l.ndim, 1);
  if (expand && out.defined()) {
    if (out.dim() != l.ndim) return false;
    std::copy(out.sizes().begin(), out.sizes().end(), l.size);
  }
  for (const at::Tensor* t : inputs)
    for (int d = static_cast<int>(t->dim()) - 1; d >= 0; d--) {
      int64_t& size = l.size[l.ndim - t->dim() + d];
      if (t->size(d) == 1 || t->size(d) == size) continue;
      if (size != 1) return false;
      size = t->size(d);
    }
  if (out.defined() && (out.dim() != l.ndim || !std::equal(l.size, l.size + l.ndim, out.sizes().begin()))) return false;
  for (int d = 0; d < l.ndim; d++) {
    l.elements *= l.size[d];
    l.order[d] = d;
  }
  c10::SmallVector<const at::Tensor*, 6> operands;
  if (out.defined()) operands.push_back(&out);
  operands.append(inputs.begin(), inputs.end());
  // TensorIterator sorts from the fastest dim on, by insertion, and leaves undecided pairs where they are.
  int fast[kMaxDims];
  for (int i = 0; i < l.ndim; i++) fast[i] = l.ndim - 1 - i;
  for (int i = 1; i < l.ndim; i++) {
    int at = i;
    for (int other = i - 1; other >= 0; other--) {
      const int s = slower(l, fast[other], fast[at], operands);
      if (s > 0) {
        std::swap(fast[other], fast[at]);
        at = other;
      } else if (s < 0) {
        break;
      }
    }
  }
  for (int i = 0; i < l.ndim; i++) l.order[i] = fast[l.ndim - 1 - i];
  return true;
}

void result_strides(const Layout& l, at::ArrayRef<const at::Tensor*> inputs, int64_t* strides) {
  // All of one shape and all dense with the same strides: the result has them, too, whatever dims of one element say.
  const at::Tensor& first = *inputs[0];
  bool same = first.dim() == l.ndim;
  for (const at::Tensor* t : inputs) same = same && t->sizes() == first.sizes();
  if (same) {
    auto all = [&](auto f) {
      return std::all_of(inputs.begin(), inputs.end(), [&](const at::Tensor* t) { return f(*t); });
    };
    if (l.ndim == 4 && all([](const at::Tensor& t) { return t.is_contiguous(at::MemoryFormat::ChannelsLast); })) {
      const int64_t c = l.size[1], w = l.size[3] * c, h = l.size[2] * w;
      strides[0] = h, strides[1] = 1, strides[2] = w, strides[3] = c;
      return;
    }
    if (all([&](const at::Tensor& t) { return t.is_non_overlapping_and_dense() && t.strides() == first.strides(); })) {
      std::copy(first.strides().begin(), first.strides().end(), strides);
      return;
    }
  }
  int64_t next = 1;
  for (int i = l.ndim - 1; i >= 0; i--) {
    strides[l.order[i]] = next;
    next *= l.size[l.order[i]];
  }
}

bool place_of(const at::Tensor& t, const Layout& l, Place& p) {
  p.offset = t.storage_offset();
  p.ndim = 0;
  if (l.flat) {
    if (l.elements != 1) {
      p.ndim = 1;
      p.size[0] = l.elements;
      p.stride[0] = 1;
    }
    return true;
  }
  for (int i = 0; i < l.ndim; i++) {
    const int d = l.order[i];
    if (l.size[d] == 1) continue;
    const int64_t size = l.size[d], stride = broadcast_stride(t, d, l.ndim, size);
    if (p.ndim && p.stride[p.ndim - 1] == size * stride) {
      p.size[p.ndim - 1] *= size;
      p.stride[p.ndim - 1] = stride;
      continue;
    }
    if (p.ndim == kTileDims) return false;
    p.size[p.ndim] = size;
    p.stride[p.ndim++] = stride;
  }
  return true;
}

}  // namespace neuron::fusion
