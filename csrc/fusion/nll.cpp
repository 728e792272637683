// Rows: negative log-likelihood of labels.
//
// Rule: labels. The host looks at the labels when the operator is called: one that is no class raises there, as
// PyTorch's CPU kernel does, and programs read them as columns in int32, -1 for those to ignore. Nothing that is
// pending runs for that, unless it writes the labels. Who runs a recording again looks again. While a graph is captured
// the operators are library operators: a replay must look at its own labels.
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

// Where labels lie, and which there are.
struct Labels {
  int64_t offset, count, stride, classes, ignored;
  // Writes the columns; returns how many labels count. `storage`: the first byte of their storage.
  int64_t read(const char* storage, int32_t* columns) const {
    const int64_t* from = reinterpret_cast<const int64_t*>(storage) + offset;
    int64_t counted = 0;
    for (int64_t i = 0; i < count; i++) {
      const int64_t label = from[i * stride];
      columns[i] = -1;
      if (label == ignored) continue;
      TORCH_CHECK_INDEX(label >= 0 && label < classes, "Target ", label, " is out of bounds.");
      columns[i] = static_cast<int32_t>(label);
      counted++;
    }
    return counted;
  }
};

Tensor new_tensor(at::IntArrayRef sizes, c10::ScalarType scalar_type, c10::DeviceIndex index) {
  const auto type = c10::scalarTypeToTypeMeta(scalar_type);
  Tensor t = uninitialised(static_cast<size_t>(c10::multiply_integers(sizes)) * type.itemsize(), type, index);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

void write(double value, c10::ScalarType type, void* p) {
  if (type == at::kFloat) *static_cast<float*>(p) = static_cast<float>(value);
  if (type == at::kBFloat16) *static_cast<c10::BFloat16*>(p) = static_cast<float>(value);
  if (type == at::kHalf) *static_cast<c10::Half*>(p) = static_cast<float>(value);
}

// What the host reads of labels, now and whenever what is recorded runs again.
class Look {
 public:
  Look(const Tensor& target, int64_t classes, int64_t ignored)
      : from_(*target.storage().unsafeGetStorageImpl()),
        labels_{target.storage_offset(), target.size(0), target.stride(0), classes, ignored},
        columns_(new_tensor(target.sizes(), at::kInt, target.device().index())) {
    Window::current(target.device().index()).settle(from_);
    counted_ = labels_.read(static_cast<const char*>(from_.data()), columns_.mutable_data_ptr<int32_t>());
  }
  const Tensor& columns() const { return columns_; }
  int64_t counted() const { return counted_; }

  void tell(RowsCall& call) const {
    call.tell([this](Window::Recording& recording) {
      recording.looked(from_, {&columns_}, [labels = labels_](const char* from, auto filled, uint32_t*) {
        labels.read(from, reinterpret_cast<int32_t*>(filled[0]));
      });
    });
  }
  // For a call that writes the loss besides. `mean`: the call's number is how many labels count. Otherwise, and if
  // losses are not reduced, no weight is asked for.
  void tell(RowsCall& call, const Tensor& total_weight, bool reduced, bool mean) const {
    const auto type = total_weight.scalar_type();
    call.tell([=, this](Window::Recording& recording) {
      recording.looked(
          from_, {&columns_, &total_weight}, [=, labels = labels_](const char* from, auto filled, uint32_t* scalars) {
            const auto counted = static_cast<float>(labels.read(from, reinterpret_cast<int32_t*>(filled[0])));
            write(reduced ? counted : 0, type, filled[1]);
            if (mean) *scalars = lane(counted);
          });
    });
  }

 private:
  c10::StorageImpl& from_;
  Labels labels_;
  Tensor columns_;
  int64_t counted_;
};

std::tuple<Tensor, Tensor> nll_loss_forward(const Tensor& self, const Tensor& target,
                                            const std::optional<Tensor>& weight, int64_t reduction,
                                            c10::SymInt ignore_index) {
  using Op = at::_ops::nll_loss_forward;
  const auto ignored = ignore_index.maybe_as_int();
  if (ignored && fusible(self, target, weight, reduction)) {
    RowsCall rows(r_nll, counter_of<Op>(), self.sizes(), kDims);
    if (rows.columns_are_fast(self) && rows.full(self)) {
      const bool none = reduction == at::Reduction::None, by_mean = reduction == at::Reduction::Mean;
      const Look look(target, self.size(1), *ignored);
      const Tensor total_weight = new_tensor({}, self.scalar_type(), self.device().index());
      write(none ? 0 : static_cast<double>(look.counted()), self.scalar_type(), total_weight.mutable_data_ptr());
      rows.labels(look.columns());
      const Tensor losses = rows.row_result(none ? self.scalar_type() : at::kFloat, target.sizes());
      if (none) look.tell(rows, total_weight, false, false);
      rows.record();
      if (none) return {losses, total_weight};
      constexpr bool kAll[1] = {true};
      RowsCall all(by_mean ? r_mean : r_sum, counter_of<Op>(), losses.sizes(), kAll);
      all.full(losses);
      if (by_mean) all.number(static_cast<float>(look.counted()));
      Tensor out = all.row_result(self.scalar_type(), {});
      look.tell(all, total_weight, true, by_mean);
      all.record(false);
      return {out, total_weight};
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
      const Look look(target, self.size(1), *ignored);
      call.labels(look.columns());
      look.tell(call);
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
