// Rows: normalisation of rows and its gradients. Everything inside one operator is fp32; its results are rounded once.
#include <utility>

#include "aten/factories.h"
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

// Group normalisation is layer normalisation of the elements of a group; its gradients of weight and bias are sums
// over the elements of a channel, then over samples.
// Inputs: dy, x, mean, 1 / standard deviation. Results: sums of dy * normalised x, and of dy.
constexpr Row r_channel_sums{.name = "group_norm_backward(channels)",
                             .lower =
                                 [](Lowering& l, const Row&) {
                                   const Formula k{l};
                                   V dy = k.in(0);
                                   k.out(0, k.reduce(L::sum, dy * ((k.in(1) - k.in(2)) * k.in(3))));
                                   k.out(1, k.reduce(L::sum, dy));
                                 },
                             .types = kFloats,
                             .row_inputs = 12,
                             .row_outputs = 3};
constexpr Row r_sum_of_samples{.name = "group_norm_backward(samples)",
                               .lower =
                                   [](Lowering& l, const Row&) {
                                     const Formula k{l};
                                     k.out(0, k.accumulate(L::sum, k.in(0)));
                                   },
                               .types = kFloats,
                               .column_outputs = 1};

// Inputs: running mean and variance, weight, bias. Number: eps. Results: what batch normalisation with known statistics
// multiplies with and adds.
template <bool Weight, bool Bias>
void batch_norm_line(Lowering& l, const Row&) {
  const Formula k{l};
  V scale = f(L::rsqrt, k.in(1) + k.number(0));
  if (Weight) scale = scale * k.in(2);
  V shift = k.in(0) * scale;
  k.out(0, scale);
  k.out(1, Bias ? k.in(2 + Weight) - shift : f(L::neg, shift));
}
template <bool Weight, bool Bias>
constexpr Row batch_norm_line_row() {
  return {.name = "batch_norm(line)", .lower = batch_norm_line<Weight, Bias>, .types = kFloats};
}
constexpr Row r_batch_norm_line[2][2] = {{batch_norm_line_row<false, false>(), batch_norm_line_row<false, true>()},
                                         {batch_norm_line_row<true, false>(), batch_norm_line_row<true, true>()}};
constexpr Row batch_norm_row(bool contiguous) {
  return {.name = "batch_norm",
          .lower =
              [](Lowering& l, const Row&) {
                const Lanes x = l.in(0), scale = l.raw(1);
                l.out(0, l.op(L::add, l.op(L::mul, x, scale), l.raw(2)));
              },
          .types = kFloats,
          .contiguous = contiguous,
          .raw = 6};
}
constexpr Row r_batch_norm[2] = {batch_norm_row(false), batch_norm_row(true)};

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

// The space of a group normalisation: rows are groups of samples; `inner` elements a channel.
struct Groups {
  int64_t samples, channels, inner, groups;
  int64_t rows() const { return samples * groups; }
  int64_t columns() const { return channels / groups * inner; }
};
constexpr bool kColumnsLast[2] = {false, true};

bool grouped(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, c10::SymInt n,
             c10::SymInt c, c10::SymInt inner, int64_t groups, Groups& g) {
  const auto samples = n.maybe_as_int(), channels = c.maybe_as_int(), elements = inner.maybe_as_int();
  if (!samples || !channels || !elements || groups <= 0 || *channels % groups || !usable(input)) return false;
  g = {*samples, *channels, *elements, groups};
  for (const auto& p : {weight, bias})
    if (given(p) && p->numel() != g.channels) return false;
  return input.is_contiguous() && g.samples * g.channels * g.inner == input.numel();
}

std::tuple<Tensor, Tensor, Tensor> native_group_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias, c10::SymInt n, c10::SymInt c,
                                                     c10::SymInt inner, int64_t group, double eps) {
  using Op = at::_ops::native_group_norm;
  const bool w = given(weight), b = given(bias);
  Groups g;
  if (grouped(input, weight, bias, n, c, inner, group, g)) {
    const auto type = input.scalar_type(), statistics = w ? weight->scalar_type() : b ? bias->scalar_type() : type;
    RowsCall call(r_layer_norm[w][b], counter_of<Op>(), {g.rows(), g.columns()}, kColumnsLast);
    if ((statistics == type || statistics == at::kFloat) && (!w || !b || weight->dtype() == bias->dtype()) &&
        call.full_flat(input) && (!w || call.per_channel(*weight, g.inner)) &&
        (!b || call.per_channel(*bias, g.inner))) {
      call.number(static_cast<float>(call.columns()));
      call.number(static_cast<float>(eps));
      Tensor out = call.full_result(type, input.sizes());
      Tensor m = call.row_result(statistics, {g.samples, group}),
             rstd = call.row_result(statistics, {g.samples, group});
      call.record();
      return {out, m, rstd};
    }
  }
  return library<Op>(input, weight, bias, std::move(n), std::move(c), std::move(inner), group, eps);
}

std::tuple<Tensor, Tensor, Tensor> native_group_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& m,
                                                              const Tensor& rstd, const std::optional<Tensor>& weight,
                                                              c10::SymInt n, c10::SymInt c, c10::SymInt inner,
                                                              int64_t group, std::array<bool, 3> mask) {
  using Op = at::_ops::native_group_norm_backward;
  const bool w = given(weight);
  Groups g;
  if (grouped(input, weight, {}, n, c, inner, group, g) && usable(grad) && grad.is_contiguous() &&
      grad.dtype() == input.dtype() && (w || (!mask[1] && !mask[2]))) {
    RowsCall whole(r_layer_norm_backward[w][kInput], counter_of<Op>(), {g.rows(), g.columns()}, kColumnsLast);
    const bool good = whole.full_flat(grad) && whole.full_flat(input) && whole.per_row(m) && whole.per_row(rstd) &&
                      (!w || whole.per_channel(*weight, g.inner));
    RowsCall channels(r_channel_sums, counter_of<Op>(), {g.samples * g.channels, g.inner}, kColumnsLast);
    const int64_t repeats = g.channels / group;
    if (good && channels.full_flat(grad) && channels.full_flat(input) && channels.per_rows(m, repeats) &&
        channels.per_rows(rstd, repeats)) {
      std::array<Tensor, 3> out;
      if (mask[0]) {
        whole.number(static_cast<float>(whole.columns()));
        out[0] = whole.full_result(input.scalar_type(), input.sizes());
        whole.record();
      }
      if (mask[1] || mask[2]) {
        const std::array<int64_t, 2> sizes{g.samples, g.channels};
        const Tensor of_weight = channels.row_result(at::kFloat, sizes),
                     of_bias = channels.row_result(at::kFloat, sizes);
        channels.record(!mask[0]);
        for (int i : {1, 2}) {
          if (!mask[static_cast<size_t>(i)]) continue;
          RowsCall samples(r_sum_of_samples, counter_of<Op>(), sizes, kColumnsLast);
          samples.full(i == 1 ? of_weight : of_bias);
          out[static_cast<size_t>(i)] = samples.column_result(weight->scalar_type(), weight->sizes());
          samples.record(false);
        }
      }
      return {out[0], out[1], out[2]};
    }
  }
  return library<Op>(grad, input, m, rstd, weight, std::move(n), std::move(c), std::move(inner), group, mask);
}

// With given statistics: for each channel a line. In training PyTorch's kernel computes.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::optional<Tensor>& mean,
                                                     const std::optional<Tensor>& variance, bool training,
                                                     double momentum, double eps) {
  using Op = at::_ops::native_batch_norm;
  const bool w = given(weight), b = given(bias);
  auto fits = [&](const std::optional<Tensor>& t) {
    return usable(*t) && t->dim() == 1 && t->numel() == input.size(1) && c10::isFloatingType(t->scalar_type());
  };
  const bool contiguous = input.is_contiguous();
  if (!training && usable(input) && (contiguous || input.is_contiguous(input.suggest_memory_format())) &&
      c10::isFloatingType(input.scalar_type()) && input.dim() >= 2 && given(mean) && given(variance) && fits(mean) &&
      fits(variance) && (!w || fits(weight)) && (!b || fits(bias))) {
    Tensor scale, shift;
    Call line{r_batch_norm_line[w][b],
              counter_of<Op>(),
              at::kFloat,
              at::kFloat,
              {&*mean, &*variance},
              {lane(static_cast<float>(eps))},
              0,
              &shift,
              at::kFloat};
    if (w) line.inputs.push_back(&*weight);
    if (b) line.inputs.push_back(&*bias);
    line.counted = false;
    if (record_pointwise(line, scale)) {
      // As dim 1 of the input.
      c10::SmallVector<int64_t, 6> sizes(static_cast<size_t>(input.dim() - 1), 1);
      sizes[0] = input.size(1);
      for (Tensor* t : {&scale, &shift}) t->unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
      Tensor out;
      if (record_pointwise({r_batch_norm[contiguous],
                            counter_of<Op>(),
                            input.scalar_type(),
                            input.scalar_type(),
                            {&input, &scale, &shift},
                            {}},
                           out)) {
        const bool mixed = mean->scalar_type() == at::kFloat || (w && weight->scalar_type() == at::kFloat);
        const auto type = c10::scalarTypeToTypeMeta(mixed ? at::kFloat : input.scalar_type());
        auto empty = [&] { return uninitialised(0, type, input.device().index()); };
        return {out, empty(), empty()};
      }
    }
  }
  return library<Op>(input, weight, bias, mean, variance, training, momentum, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", TORCH_FN(native_layer_norm));
  m.impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
  m.impl("native_group_norm", TORCH_FN(native_group_norm));
  m.impl("native_group_norm_backward", TORCH_FN(native_group_norm_backward));
  m.impl("native_batch_norm", TORCH_FN(native_batch_norm));
}

}  // namespace neuron::fusion
