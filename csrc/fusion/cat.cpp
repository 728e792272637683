// Concatenation, as one copy into a part of the result for each tensor.
//
// Rule: runs. A concatenation is recorded if all tensors have one type and dense rows of kLeastRun elements or more
// that stay together in the result.
//
// Reason: what was computed to be concatenated is then written to where it belongs. Shorter runs are moved one element
// after the other, which the library does faster.
#include "aten/factories.h"
#include "operator.h"
#include "pointwise.h"
#include "record.h"

namespace neuron::fusion {

namespace {

constexpr int64_t kLeastRun = 16;
constexpr size_t kMostParts = 8;

bool fusible(const at::ITensorListRef& tensors, int64_t dim) {
  const Tensor& first = *tensors.begin();
  if (tensors.size() > kMostParts || dim < 0 || dim >= first.dim()) return false;
  if (first.scalar_type() != at::kFloat && first.scalar_type() != at::kBFloat16 && first.scalar_type() != at::kHalf)
    return false;
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < first.dim(); d++) inner *= first.size(d);
  for (const Tensor& t : tensors) {
    if (!usable(t) || t.device() != first.device() || t.dtype() != first.dtype() || t.dim() != first.dim() ||
        t.suggest_memory_format() != c10::MemoryFormat::Contiguous || t.size(dim) * inner < kLeastRun ||
        t.stride(-1) != 1)
      return false;
    for (int64_t d = 0; d < t.dim(); d++)
      if (d != dim && t.size(d) != first.size(d)) return false;
  }
  return true;
}

// The part of a contiguous tensor that `t` is copied to.
Tensor part_of(const Tensor& out, const Tensor& t, int64_t dim, int64_t at) {
  Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(out.storage()),
                                                         out.key_set(), out.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(at * out.stride(dim));
  part.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), out.strides());
  return part;
}

Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  using Op = at::_ops::cat;
  if (tensors.size() == 0) return library<Op>(tensors, dim);
  const Tensor& first = *tensors.begin();
  const int64_t d = dim < 0 ? dim + first.dim() : dim;
  if (!fusible(tensors, d)) return library<Op>(tensors, dim);
  c10::SmallVector<int64_t, 6> size(first.sizes());
  size[static_cast<size_t>(d)] = 0;
  int64_t elements = 0;
  for (const Tensor& t : tensors) {
    size[static_cast<size_t>(d)] += t.size(d);
    elements += t.numel();
  }
  Tensor out = uninitialised(static_cast<size_t>(elements) * first.itemsize(), first.dtype(), first.device().index());
  out.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  int64_t at = 0;
  for (const Tensor& t : tensors) {
    Tensor part = part_of(out, t, d, at);
    Call call{r_copy, counter_of<Op>(), first.scalar_type(), first.scalar_type(), {&t}, {}};
    call.counted = at == 0;
    if (!record_pointwise(call, part)) library<at::_ops::copy_>(part, t, false);
    at += t.size(d);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("cat", TORCH_FN(cat)); }

}  // namespace neuron::fusion
