// Rows: normalisation of rows and its gradients. Everything inside one operator is fp32; its results are rounded once.
#include <utility>

#include "formula.h"
#include "operator.h"
#include "record_rows.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;

// The mean of each row; number 0 of these nodes is the number of columns.
V mean(const Formula& k, V x) { return k.reduce(L::sum, x) / k.number(0); }

// Inputs: x, weight, bias. Numbers: columns, eps. Results: y, mean, 1 / standard deviation.
template <bool Weight, bool Bias>
void layer_norm(Lowering& l, const Row&) {
  const Formula k{l};
  V x = k.in(0);
  V m = mean(k, x), d = x - m;
  V rstd = f(L::rsqrt, mean(k, d * d) + k.number(1));
  V y = d * rstd;
  if (Weight) y = y * k.in(1);
  if (Bias) y = y + k.in(1 + Weight);
  k.out(0, y);
  k.out(1, m);
  k.out(2, rstd);
}
template <bool Weight, bool Bias>
constexpr Row layer_norm_row() {
  return {.name = "layer_norm", .lower = layer_norm<Weight, Bias>, .types = kFloats, .row_outputs = 6};
}
constexpr Row r_layer_norm[2][2] = {{layer_norm_row<false, false>(), layer_norm_row<false, true>()},
                                    {layer_norm_row<true, false>(), layer_norm_row<true, true>()}};

// Which gradients are asked for, as bits.
enum Gradients : int { kInput = 1, kWeight = 2, kBias = 4 };

// Inputs: dy, x, mean, 1 / standard deviation, weight. Number: columns. Results: those of `Wanted`, in order.
template <bool Weight, int Wanted>
void layer_norm_backward(Lowering& l, const Row&) {
  const Formula k{l};
  int result = 0;
  V dy = k.in(0), normal = (k.in(1) - k.in(2)) * k.in(3);
  if (Wanted & kInput) {
    V g = Weight ? dy * k.in(4) : dy;
    k.out(result++, k.in(3) * (g - mean(k, g) - normal * mean(k, g * normal)));
  }
  if (Wanted & kWeight) k.out(result++, k.accumulate(L::sum, dy * normal));
  if (Wanted & kBias) k.out(result++, k.accumulate(L::sum, dy));
}
template <bool Weight, int Wanted>
constexpr Row layer_norm_backward_row() {
  constexpr int kFirst = Wanted & kInput ? 1 : 0, kSums = (Wanted & kWeight ? 1 : 0) + (Wanted & kBias ? 1 : 0);
  return {.name = "layer_norm_backward",
          .lower = layer_norm_backward<Weight, Wanted>,
          .types = kFloats,
          .row_inputs = 12,
          .column_outputs = ((1 << kSums) - 1) << kFirst};
}
template <int... Wanted>
constexpr auto layer_norm_backward_rows(std::integer_sequence<int, Wanted...>) {
  return std::array{std::array{layer_norm_backward_row<false, Wanted>()...},
                    std::array{layer_norm_backward_row<true, Wanted>()...}};
}
constexpr auto r_layer_norm_backward = layer_norm_backward_rows(std::make_integer_sequence<int, 8>());

// ---- recording -----------------------------------------------------------------------------------------------------
bool given(const std::optional<Tensor>& t) { return t && t->defined(); }

// Which dims `normalized_shape` covers, and the shape of the statistics; false if it does not fit.
bool normalized(const Tensor& input, c10::SymIntArrayRef shape, bool* dims, c10::SmallVector<int64_t, 6>& stats) {
  const int64_t n = static_cast<int64_t>(shape.size()), ndim = input.dim();
  if (input.device().type() != kNeuron || input.numel() == 0 || n == 0 || n > ndim || ndim > kMaxDims) return false;
  for (int64_t d = 0; d < ndim; d++) {
    dims[d] = d >= ndim - n;
    if (dims[d] && shape[d - (ndim - n)].maybe_as_int() != input.size(d)) return false;
    stats.push_back(dims[d] ? 1 : input.size(d));
  }
  return true;
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm(const Tensor& input, c10::SymIntArrayRef shape,
                                                     const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias, double eps) {
  using Op = at::_ops::native_layer_norm;
  const bool w = given(weight), b = given(bias);
  bool dims[kMaxDims];
  c10::SmallVector<int64_t, 6> stats;
  if (normalized(input, shape, dims, stats)) {
    RowsCall call(r_layer_norm[w][b], counter_of<Op>(), input.sizes(), dims);
    if (call.full(input) && (!w || call.per_column(*weight)) && (!b || call.per_column(*bias)) &&
        (!w || !b || weight->dtype() == bias->dtype())) {
      const auto type = input.scalar_type();
      const auto parameters = w ? weight->scalar_type() : b ? bias->scalar_type() : type;
      if (parameters == type || parameters == at::kFloat) {
        call.number(static_cast<float>(call.columns()));
        call.number(static_cast<float>(eps));
        Tensor out = call.full_result(type, input.sizes());
        Tensor m = call.row_result(parameters, stats), rstd = call.row_result(parameters, stats);
        call.record();
        return {out, m, rstd};
      }
    }
  }
  return library<Op>(input, shape, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                              c10::SymIntArrayRef shape, const Tensor& m,
                                                              const Tensor& rstd, const std::optional<Tensor>& weight,
                                                              const std::optional<Tensor>& bias,
                                                              std::array<bool, 3> mask) {
  using Op = at::_ops::native_layer_norm_backward;
  const bool w = given(weight);
  const int wanted = mask[0] * kInput | mask[1] * kWeight | mask[2] * kBias;
  const bool fits = (!mask[1] || w) && (!mask[2] || given(bias));
  bool dims[kMaxDims];
  c10::SmallVector<int64_t, 6> stats;
  if (wanted && fits && normalized(input, shape, dims, stats)) {
    RowsCall call(r_layer_norm_backward[w][static_cast<size_t>(wanted)], counter_of<Op>(), input.sizes(), dims);
    if (call.full(grad) && call.full(input) && call.per_row(m) && call.per_row(rstd) &&
        (!w || call.per_column(*weight))) {
      call.number(static_cast<float>(call.columns()));
      std::tuple<Tensor, Tensor, Tensor> out;
      if (mask[0]) std::get<0>(out) = call.full_result(input.scalar_type(), input.sizes());
      if (mask[1]) std::get<1>(out) = call.column_result(weight->scalar_type(), weight->sizes());
      if (mask[2]) std::get<2>(out) = call.column_result(bias->scalar_type(), bias->sizes());
      call.record();
      return out;
    }
  }
  return library<Op>(grad, input, shape, m, rstd, weight, bias, mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", TORCH_FN(native_layer_norm));
  m.impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
}

}  // namespace neuron::fusion
