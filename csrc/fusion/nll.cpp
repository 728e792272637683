// Rows: negative log-likelihood of labels.
//
// Rule: labels. The host looks at the labels when the operator is called: one that is no class raises there, as
// PyTorch's CPU kernel does, and programs read them as columns in int32, -1 for those to ignore. Nothing that is
// pending runs for that, unless it writes the labels. While a graph is captured the operators are library operators: a
// replay must look at its own labels.
//
// Reason: programs have no 64-bit integers, and an error that comes later than its call cannot be caught where it is
// made.
#include <ATen/core/Reduction.h>

#include "aten/factories.h"
#include "aten/graph.h"
#include "formula.h"
#include "operator.h"
#include "record_rows.h"
#include "window.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;

// Inputs: log-probabilities, columns. The loss of each row.
constexpr Row r_nll{.name = "nll_loss",
                    .lower =
                        [](Lowering& l, const Row&) {
                          const Lanes x = l.in(0);
                          l.out(0, l.op(L::sub, l.constant(0.0f), l.gather(x, l.raw(1))));
                        },
                    .types = kFloats,
                    .row_inputs = 2,
                    .row_outputs = 1};

// Of the losses of all rows. Number of the mean: how many of them count.
constexpr Row r_sum{.name = "nll_loss(sum)",
                    .lower =
                        [](Lowering& l, const Row&) {
                          const Formula k{l};
                          k.out(0, k.reduce(L::sum, k.in(0)));
                        },
                    .types = kFloats,
                    .row_outputs = 1};
constexpr Row r_mean{.name = "nll_loss(mean)",
                     .lower =
                         [](Lowering& l, const Row&) {
                           const Formula k{l};
                           k.out(0, k.reduce(L::sum, k.in(0)) / k.number(0));
                         },
                     .types = kFloats,
                     .row_outputs = 1};

// Inputs: gradient of the loss, columns; of a mean also the total weight.
template <bool Mean>
void nll_backward(Lowering& l, const Row&) {
  const Formula k{l};
  V g = f(L::neg, k.in(0));
  if (Mean) {
    V total = k.in(2);
    g = where(total > k.c(0), g / total, k.c(0));
  }
  l.out(0, l.scatter(g, l.raw(1)));
}
constexpr Row r_nll_backward[2] = {
    {.name = "nll_loss_backward", .lower = nll_backward<false>, .types = kFloats, .row_inputs = 3},
    {.name = "nll_loss_backward(mean)", .lower = nll_backward<true>, .types = kFloats, .row_inputs = 7}};

// ---- recording -----------------------------------------------------------------------------------------------------
constexpr bool kDims[2] = {false, true};  // rows are samples, columns classes

bool fusible(const Tensor& self, const Tensor& target, const std::optional<Tensor>& weight, int64_t reduction) {
  return self.dim() == 2 && usable(self) && dtype_of(self.scalar_type()) && c10::isFloatingType(self.scalar_type()) &&
         !(weight && weight->defined()) && reduction >= at::Reduction::None && reduction < at::Reduction::END &&
         target.dim() == 1 && target.scalar_type() == at::kLong && target.device() == self.device() &&
         target.layout() == c10::kStrided && !target.is_neg() && target.size(0) == self.size(0) &&
         self.size(1) <= INT32_MAX && !current_capture();
}

struct Labels {
  Tensor columns;
  int64_t counted = 0;
};
Labels labels_of(const Tensor& target, int64_t classes, int64_t ignore_index) {
  const c10::DeviceIndex index = target.device().index();
  // Who records operators to run what they recorded again must call this one each time.
  t_library_calls++;
  Window::current(index).settle(*target.storage().unsafeGetStorageImpl());
  const int64_t n = target.size(0), stride = target.stride(0);
  const auto type = c10::scalarTypeToTypeMeta(at::kInt);
  Labels labels{uninitialised(static_cast<size_t>(n) * type.itemsize(), type, index)};
  labels.columns.unsafeGetTensorImpl()->set_sizes_contiguous(n);
  const auto* from = target.const_data_ptr<int64_t>();
  auto* to = labels.columns.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < n; i++) {
    const int64_t label = from[i * stride];
    to[i] = -1;
    if (label == ignore_index) continue;
    TORCH_CHECK_INDEX(label >= 0 && label < classes, "Target ", label, " is out of bounds.");
    to[i] = static_cast<int32_t>(label);
    labels.counted++;
  }
  return labels;
}

// A number as a tensor.
Tensor total_weight_of(double value, const Tensor& like) {
  Tensor t = uninitialised(like.itemsize(), like.dtype(), like.device().index());
  t.unsafeGetTensorImpl()->set_sizes_contiguous({});
  void* p = t.mutable_data_ptr();
  if (like.scalar_type() == at::kFloat) *static_cast<float*>(p) = static_cast<float>(value);
  if (like.scalar_type() == at::kBFloat16) *static_cast<c10::BFloat16*>(p) = static_cast<float>(value);
  if (like.scalar_type() == at::kHalf) *static_cast<c10::Half*>(p) = static_cast<float>(value);
  return t;
}

std::tuple<Tensor, Tensor> nll_loss_forward(const Tensor& self, const Tensor& target,
                                            const std::optional<Tensor>& weight, int64_t reduction,
                                            c10::SymInt ignore_index) {
  using Op = at::_ops::nll_loss_forward;
  const auto ignored = ignore_index.maybe_as_int();
  if (ignored && fusible(self, target, weight, reduction)) {
    RowsCall rows(r_nll, counter_of<Op>(), self.sizes(), kDims);
    if (rows.columns_are_fast(self) && rows.full(self)) {
      const bool none = reduction == at::Reduction::None, by_mean = reduction == at::Reduction::Mean;
      const Labels labels = labels_of(target, self.size(1), *ignored);
      rows.labels(labels.columns);
      const Tensor losses = rows.row_result(none ? self.scalar_type() : at::kFloat, target.sizes());
      rows.record();
      if (none) return {losses, total_weight_of(0, self)};
      constexpr bool kAll[1] = {true};
      RowsCall all(by_mean ? r_mean : r_sum, counter_of<Op>(), losses.sizes(), kAll);
      all.full(losses);
      if (by_mean) all.number(static_cast<float>(labels.counted));
      Tensor out = all.row_result(self.scalar_type(), {});
      all.record(false);
      return {out, total_weight_of(static_cast<double>(labels.counted), self)};
    }
  }
  return library<Op>(self, target, weight, reduction, std::move(ignore_index));
}

Tensor nll_loss_backward(const Tensor& grad, const Tensor& self, const Tensor& target,
                         const std::optional<Tensor>& weight, int64_t reduction, c10::SymInt ignore_index,
                         const Tensor& total_weight) {
  using Op = at::_ops::nll_loss_backward;
  const auto ignored = ignore_index.maybe_as_int();
  if (ignored && fusible(self, target, weight, reduction) && grad.dtype() == self.dtype()) {
    const bool by_mean = reduction == at::Reduction::Mean;
    RowsCall call(r_nll_backward[by_mean], counter_of<Op>(), self.sizes(), kDims);
    const bool fits = reduction == at::Reduction::None ? grad.sizes() == target.sizes() && call.per_row(grad)
                                                       : grad.dim() == 0 && call.single(grad);
    if (fits && (!by_mean || (total_weight.dtype() == self.dtype() && usable(total_weight) &&
                              total_weight.device() == self.device() && total_weight.numel() == 1))) {
      const Labels labels = labels_of(target, self.size(1), *ignored);
      call.labels(labels.columns);
      if (by_mean) call.single(total_weight);
      Tensor out = call.full_result(self.scalar_type(), self.sizes());
      call.record();
      return out;
    }
  }
  return library<Op>(grad, self, target, weight, reduction, std::move(ignore_index), total_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("nll_loss_forward", TORCH_FN(nll_loss_forward));
  m.impl("nll_loss_backward", TORCH_FN(nll_loss_backward));
}

}  // namespace neuron::fusion
