// Rows: sums, means, extremes and norms over dims, softmax, and their backward forms. Everything inside one operator is
// fp32; its results are rounded once.
#include <ATen/core/Reduction.h>

#include <span>

#include "formula.h"
#include "operator.h"
#include "record_rows.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;

constexpr Row reduces(const char* name, void (*lower)(Lowering&, const Row&), uint8_t row_inputs, uint8_t row_outputs) {
  return {.name = name, .lower = lower, .types = kFloats, .row_inputs = row_inputs, .row_outputs = row_outputs};
}

// What is reduced: the elements of each row, or (Across) those of each column.
template <bool Across>
V total(const Formula& k, L op, V v) {
  return Across ? k.accumulate(op, v) : k.reduce(op, v);
}

// A reduction to one value, given by a formula, in both directions.
#define REDUCTION(ID, NAME, ...)                                                      \
  template <bool Across>                                                              \
  void lower_##ID(Lowering& l, const Row&) {                                          \
    const Formula k{l};                                                               \
    k.out(0, [&]()->V __VA_ARGS__());                                                 \
  }                                                                                   \
  constexpr Row ID[2] = {                                                             \
      {.name = NAME, .lower = lower_##ID<false>, .types = kFloats, .row_outputs = 1}, \
      {.name = NAME " of columns", .lower = lower_##ID<true>, .types = kFloats, .column_outputs = 1}}
// clang-format off
REDUCTION(r_sum, "sum", { return total<Across>(k, L::sum, k.in(0)); });
// Number 0: how many elements each result is made of.
REDUCTION(r_mean, "mean", { return total<Across>(k, L::sum, k.in(0)) / k.number(0); });
REDUCTION(r_amax, "amax", { return total<Across>(k, L::amax, k.in(0)); });
REDUCTION(r_amin, "amin", { return total<Across>(k, L::amin, k.in(0)); });
REDUCTION(r_norm_1, "norm(1)", { return total<Across>(k, L::sum, f(L::abs, k.in(0))); });
REDUCTION(r_norm_2, "norm(2)", { V x = k.in(0); return f(L::sqrt, total<Across>(k, L::sum, x * x)); });
REDUCTION(r_norm_max, "norm(inf)", { return total<Across>(k, L::amax, f(L::abs, k.in(0))); });
// clang-format on
#undef REDUCTION

// The mean of each row; number 0 of these nodes is the number of columns.
V mean(const Formula& k, V x) { return k.reduce(L::sum, x) / k.number(0); }

#define ROW(row, name, row_inputs, row_outputs, ...) \
  constexpr Row row = reduces(                       \
      name,                                          \
      [](Lowering& l, const Row&) {                  \
        const Formula k{l};                          \
        __VA_ARGS__                                  \
      },                                             \
      row_inputs, row_outputs)
// clang-format off
ROW(r_mse_sum, "mse_loss(sum)", 0, 1, { V d = k.in(0) - k.in(1); k.out(0, k.reduce(L::sum, d * d)); });
ROW(r_mse_mean, "mse_loss", 0, 1, { V d = k.in(0) - k.in(1); k.out(0, mean(k, d * d)); });
// Binary cross entropy of logits: (1 - target) * x - log(sigmoid(x)).
V bce(const Formula& k) {
  V x = k.in(0), one = k.c(1);
  V log_sigmoid = f(L::minimum, x, k.c(0)) - f(L::log1p, f(L::exp, f(L::neg, f(L::abs, x))));
  return (one - k.in(1)) * x - log_sigmoid;
}
ROW(r_bce_sum, "binary_cross_entropy_with_logits(sum)", 0, 1, { k.out(0, k.reduce(L::sum, bce(k))); });
ROW(r_bce_mean, "binary_cross_entropy_with_logits", 0, 1, { k.out(0, mean(k, bce(k))); });
// Number 1: columns less the correction, at least 0.
ROW(r_var, "var", 0, 1, {
  V x = k.in(0);
  V d = x - mean(k, x);
  k.out(0, k.reduce(L::sum, d * d) / k.number(1)); });
ROW(r_std, "std", 0, 1, {
  V x = k.in(0);
  V d = x - mean(k, x);
  k.out(0, f(L::sqrt, k.reduce(L::sum, d * d) / k.number(1))); });
ROW(r_softmax, "softmax", 0, 0, {
  V x = k.in(0);
  V e = f(L::exp, x - k.reduce(L::amax, x));
  k.out(0, e / k.reduce(L::sum, e)); });
ROW(r_log_softmax, "log_softmax", 0, 0, {
  V x = k.in(0);
  V d = x - k.reduce(L::amax, x);
  k.out(0, d - f(L::log, k.reduce(L::sum, f(L::exp, d)))); });
ROW(r_softmax_backward, "softmax_backward", 0, 0, {
  V dy = k.in(0), y = k.in(1);
  k.out(0, (dy - k.reduce(L::sum, dy * y)) * y); });
ROW(r_log_softmax_backward, "log_softmax_backward", 0, 0, {
  V dy = k.in(0), y = k.in(1);
  k.out(0, dy - f(L::exp, y) * k.reduce(L::sum, dy)); });
// clang-format on

using at::IntArrayRef;

// ---- recording -----------------------------------------------------------------------------------------------------
struct Reduced {
  bool dims[kMaxDims] = {};
  c10::SmallVector<int64_t, 6> sizes;  // of the result
  bool good = false;
};
Reduced reduced(const Tensor& t, at::OptionalIntArrayRef dim, bool keepdim) {
  Reduced r;
  if (t.dim() > kMaxDims || t.device().type() != kNeuron || t.numel() == 0) return r;
  if (!dim || dim->empty()) {
    std::fill_n(r.dims, t.dim(), true);
  } else {
    for (int64_t d : *dim) {
      if (d < -t.dim() || d >= t.dim()) return r;
      bool& seen = r.dims[d < 0 ? d + t.dim() : d];
      if (seen) return r;
      seen = true;
    }
  }
  for (int64_t d = 0; d < t.dim(); d++)
    if (!r.dims[d])
      r.sizes.push_back(t.size(d));
    else if (keepdim)
      r.sizes.push_back(1);
  r.good = true;
  return r;
}

// A reduction of one input. `rows[0]` reduces rows, `rows[1]`, if there is one, columns.
bool reduce(std::span<const Row> rows, OpCounter& count, const Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
            std::optional<at::ScalarType> dtype, Tensor& out, std::initializer_list<float> numbers_after = {},
            bool length_as_number = false) {
  const Reduced r = reduced(self, dim, keepdim);
  const auto type = dtype.value_or(self.scalar_type());
  if (!r.good || !c10::isFloatingType(type) || !dtype_of(type)) return false;
  auto record = [&](RowsCall& call, int64_t length, Tensor (RowsCall::*result)(c10::ScalarType, IntArrayRef)) {
    if (!call.full(self)) return false;
    if (length_as_number) call.number(static_cast<float>(length));
    for (float n : numbers_after) call.number(n);
    out = (call.*result)(type, r.sizes);
    call.record();
    return true;
  };
  RowsCall along(rows[0], count, self.sizes(), r.dims);
  if (along.columns_are_fast(self)) return record(along, along.columns(), &RowsCall::row_result);
  if (rows.size() < 2) return false;
  bool kept[kMaxDims];
  for (int64_t d = 0; d < self.dim(); d++) kept[d] = !r.dims[d];
  RowsCall across(rows[1], count, self.sizes(), kept);
  return across.rows_are_runs(self) && record(across, across.rows(), &RowsCall::column_result);
}

Tensor sum_dim(const Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  using Op = at::_ops::sum_dim_IntList;
  Tensor out;
  if (reduce(r_sum, counter_of<Op>(), self, dim, keepdim, dtype, out)) return out;
  return library<Op>(self, dim, keepdim, dtype);
}
Tensor sum(const Tensor& self, std::optional<at::ScalarType> dtype) {
  using Op = at::_ops::sum;
  Tensor out;
  if (reduce(r_sum, counter_of<Op>(), self, {}, false, dtype, out)) return out;
  return library<Op>(self, dtype);
}
Tensor mean_dim(const Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  using Op = at::_ops::mean_dim;
  Tensor out;
  if (c10::isFloatingType(self.scalar_type()) &&
      reduce(r_mean, counter_of<Op>(), self, dim, keepdim, dtype, out, {}, true))
    return out;
  return library<Op>(self, dim, keepdim, dtype);
}
Tensor mean_all(const Tensor& self, std::optional<at::ScalarType> dtype) {
  using Op = at::_ops::mean;
  Tensor out;
  if (c10::isFloatingType(self.scalar_type()) &&
      reduce(r_mean, counter_of<Op>(), self, {}, false, dtype, out, {}, true))
    return out;
  return library<Op>(self, dtype);
}
template <class Op, const Row (&rows)[2]>
Tensor extreme_dim(const Tensor& self, IntArrayRef dim, bool keepdim) {
  Tensor out;
  if (reduce(rows, counter_of<Op>(), self, dim, keepdim, {}, out)) return out;
  return library<Op>(self, dim, keepdim);
}
template <class Op, const Row (&rows)[2]>
Tensor extreme(const Tensor& self) {
  Tensor out;
  if (reduce(rows, counter_of<Op>(), self, {}, false, {}, out)) return out;
  return library<Op>(self);
}
template <class Op, const Row& row>
Tensor variance(const Tensor& self, at::OptionalIntArrayRef dim, const std::optional<at::Scalar>& correction,
                bool keepdim) {
  Tensor out;
  const Reduced r = reduced(self, dim, keepdim);
  if (r.good) {
    double columns = 1;
    for (int64_t d = 0; d < self.dim(); d++)
      if (r.dims[d]) columns *= static_cast<double>(self.size(d));
    const double rest = columns - (correction ? correction->toDouble() : 1);
    // Too few elements is a case with a warning.
    if (rest > 0 && reduce({&row, 1}, counter_of<Op>(), self, dim, keepdim, {}, out, {static_cast<float>(rest)}, true))
      return out;
  }
  return library<Op>(self, dim, correction, keepdim);
}
Tensor vector_norm(const Tensor& self, const at::Scalar& order, at::OptionalIntArrayRef dim, bool keepdim,
                   std::optional<at::ScalarType> dtype) {
  using Op = at::_ops::linalg_vector_norm;
  Tensor out;
  if (!order.isComplex()) {
    const double p = order.toDouble();
    const Row* rows = p == 2 ? r_norm_2 : p == 1 ? r_norm_1 : p == INFINITY ? r_norm_max : nullptr;
    if (rows && c10::isFloatingType(self.scalar_type()) &&
        reduce({rows, 2}, counter_of<Op>(), self, dim, keepdim, dtype, out))
      return out;
  }
  return library<Op>(self, order, dim, keepdim, dtype);
}

// A loss of two contiguous tensors, summed or averaged.
bool reduced_loss(const Row& by_sum, const Row& by_mean, OpCounter& count, const Tensor& self, const Tensor& target,
                  int64_t reduction, Tensor& out) {
  const Reduced r = reduced(self, {}, false);
  if (!r.good || (reduction != at::Reduction::Mean && reduction != at::Reduction::Sum) ||
      self.dtype() != target.dtype() || !c10::isFloatingType(self.scalar_type()) || !dtype_of(self.scalar_type()) ||
      !self.is_contiguous() || !target.is_contiguous())
    return false;
  const bool averaged = reduction == at::Reduction::Mean;
  RowsCall call(averaged ? by_mean : by_sum, count, self.sizes(), r.dims);
  if (!call.full(self) || !call.full(target)) return false;
  if (averaged) call.number(static_cast<float>(call.columns()));
  out = call.row_result(self.scalar_type(), {});
  call.record();
  return true;
}
Tensor mse_loss(const Tensor& self, const Tensor& target, int64_t reduction) {
  using Op = at::_ops::mse_loss;
  Tensor out;
  if (reduced_loss(r_mse_sum, r_mse_mean, counter_of<Op>(), self, target, reduction, out)) return out;
  return library<Op>(self, target, reduction);
}
Tensor bce_with_logits(const Tensor& self, const Tensor& target, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& pos_weight, int64_t reduction) {
  using Op = at::_ops::binary_cross_entropy_with_logits;
  Tensor out;
  if (!(weight && weight->defined()) && !(pos_weight && pos_weight->defined()) &&
      reduced_loss(r_bce_sum, r_bce_mean, counter_of<Op>(), self, target, reduction, out))
    return out;
  return library<Op>(self, target, weight, pos_weight, reduction);
}

// A result of the input's shape, over the last dim.
template <class... Inputs>
bool along_last(const Row& row, OpCounter& count, int64_t dim, c10::ScalarType type, Tensor& out, const Tensor& first,
                const Inputs&... more) {
  const int64_t ndim = first.dim();
  if (first.device().type() != kNeuron || first.numel() == 0 || ndim == 0 || ndim > kMaxDims || !dtype_of(type) ||
      (dim != ndim - 1 && dim != -1))
    return false;
  bool dims[kMaxDims] = {};
  dims[ndim - 1] = true;
  RowsCall call(row, count, first.sizes(), dims);
  if (!call.columns_are_fast(first) || !call.full(first) || !(call.full(more) && ...)) return false;
  out = call.full_result(type, first.sizes());
  call.record();
  return true;
}

template <class Op, const Row& row>
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  Tensor out;
  if (!half_to_float && along_last(row, counter_of<Op>(), dim, self.scalar_type(), out, self)) return out;
  return library<Op>(self, dim, half_to_float);
}
template <class Op, const Row& row>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType input_dtype) {
  Tensor out;
  if (grad.scalar_type() == input_dtype && along_last(row, counter_of<Op>(), dim, input_dtype, out, grad, output))
    return out;
  return library<Op>(grad, output, dim, input_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("sum.dim_IntList", TORCH_FN(sum_dim));
  m.impl("sum", TORCH_FN(sum));
  m.impl("mean.dim", TORCH_FN(mean_dim));
  m.impl("mean", TORCH_FN(mean_all));
  m.impl("amax", TORCH_FN((extreme_dim<at::_ops::amax, r_amax>)));
  m.impl("amin", TORCH_FN((extreme_dim<at::_ops::amin, r_amin>)));
  m.impl("max", TORCH_FN((extreme<at::_ops::max, r_amax>)));
  m.impl("min", TORCH_FN((extreme<at::_ops::min, r_amin>)));
  m.impl("var.correction", TORCH_FN((variance<at::_ops::var_correction, r_var>)));
  m.impl("std.correction", TORCH_FN((variance<at::_ops::std_correction, r_std>)));
  m.impl("linalg_vector_norm", TORCH_FN(vector_norm));
  m.impl("mse_loss", TORCH_FN(mse_loss));
  m.impl("binary_cross_entropy_with_logits", TORCH_FN(bce_with_logits));
  m.impl("_softmax", TORCH_FN((softmax<at::_ops::_softmax, r_softmax>)));
  m.impl("_log_softmax", TORCH_FN((softmax<at::_ops::_log_softmax, r_log_softmax>)));
  m.impl("_softmax_backward_data", TORCH_FN((softmax_backward<at::_ops::_softmax_backward_data, r_softmax_backward>)));
  m.impl("_log_softmax_backward_data",
         TORCH_FN((softmax_backward<at::_ops::_log_softmax_backward_data, r_log_softmax_backward>)));
}

}  // namespace neuron::fusion
