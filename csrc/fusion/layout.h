// Shapes, strides and the order of iteration of pointwise calls, as PyTorch's TensorIterator decides them.
#pragma once

#include <ATen/core/Tensor.h>

#include "graph.h"

namespace neuron::fusion {

inline constexpr int kMaxDims = 16;

struct Layout {
  int ndim = 0;
  int64_t size[kMaxDims];
  int order[kMaxDims];  // dims from slow to fast
  int64_t elements = 1;
  bool flat = false;  // every operand and the result are contiguous and of one shape
};

// The layout of a call on `inputs` that writes to `out` (undefined: a new tensor). False if shapes do not broadcast,
// or if `out` has another shape.
// `expand`: inputs may be smaller than `out` and repeat.
bool plan_layout(at::ArrayRef<const at::Tensor*> inputs, const at::Tensor& out, bool expand, Layout& layout);

// Strides of a new result.
void result_strides(const Layout& layout, at::ArrayRef<const at::Tensor*> inputs, int64_t* strides);

// The place of a tensor. False if it has too many dims that do not merge.
bool place_of(const at::Tensor& t, const Layout& layout, Place& place);

}  // namespace neuron::fusion
