// Rows: activation functions and their backward forms, by the formulas of PyTorch's CPU kernels.
#include <ATen/core/Reduction.h>

#include "formula.h"
#include "typed.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;
using Lower = void (*)(Lowering&, const Row&);

constexpr Row floats(const char* name, Lower lower, const Row* other = nullptr) {
  return {.name = name, .lower = lower, .types = kFloats, .other = other};
}

V clamped(const Formula& k, V x, float low, float high) { return f(L::minimum, f(L::maximum, x, k.c(low)), k.c(high)); }

// A row from a formula of its value.
#define ROW(row, name, ...)                                      \
  constexpr Row row = floats(name, [](Lowering& l, const Row&) { \
    const Formula k{l};                                          \
    l.out(0, [&]()->V __VA_ARGS__());                            \
  })
#define ROW_OR(row, name, other, ...)     \
  constexpr Row row = floats(             \
      name,                               \
      [](Lowering& l, const Row&) {       \
        const Formula k{l};               \
        l.out(0, [&]()->V __VA_ARGS__()); \
      },                                  \
      &other)

constexpr float kSqrtHalf = 0.70710678118654752440f, kSqrt2OverPi = 0.79788456080286535588f, kCubic = 0.044715f;

V gelu_tanh_inner(const Formula& k, V x) { return k.c(kSqrt2OverPi) * (x + k.c(kCubic) * (x * x * x)); }

}  // namespace

constexpr Row r_relu{
    .name = "relu",
    .lower =
        [](Lowering& l, const Row&) {
          const Lanes x = l.in(0);
          l.out(0, l.floating() ? l.op(L::maximum, x, l.constant(0.0f)) : l.op(L::imaximum, x, l.integer(0)));
        },
    .types = kFloats | kInts};

// clang-format off
ROW(r_gelu_tanh, "gelu(tanh)", { V x = k.in(0); return k.c(0.5f) * x * (k.c(1) + f(L::tanh, gelu_tanh_inner(k, x))); });
ROW_OR(r_gelu, "gelu", r_gelu_tanh, { V x = k.in(0); return x * k.c(0.5f) * (k.c(1) + f(L::erf, x * k.c(kSqrtHalf))); });
ROW(r_gelu_tanh_backward, "gelu_backward(tanh)", {
  V dy = k.in(0), x = k.in(1);
  V t = f(L::tanh, gelu_tanh_inner(k, x));
  V left = k.c(0.5f) * x, right = k.c(1) + t;
  V dtanh = k.c(1) - t * t, dinner = k.c(kSqrt2OverPi) * (k.c(1) + k.c(3 * kCubic) * (x * x));
  return dy * (k.c(0.5f) * right + left * dtanh * dinner); });
ROW_OR(r_gelu_backward, "gelu_backward", r_gelu_tanh_backward, {
  V dy = k.in(0), x = k.in(1);
  V cdf = k.c(0.5f) * (k.c(1) + f(L::erf, x * k.c(kSqrtHalf)));
  V pdf = k.c(0.39894228040143267794f) * f(L::exp, k.c(-0.5f) * (x * x));
  return dy * (cdf + x * pdf); });
ROW(r_silu, "silu", { V x = k.in(0); return x / (k.c(1) + f(L::exp, f(L::neg, x))); });
ROW(r_silu_backward, "silu_backward", {
  V dy = k.in(0), x = k.in(1);
  V s = f(L::sigmoid, x);
  return dy * s * (k.c(1) + x * (k.c(1) - s)); });
ROW(r_sigmoid_backward, "sigmoid_backward", { V dy = k.in(0), y = k.in(1); return dy * (k.c(1) - y) * y; });
ROW(r_tanh_backward, "tanh_backward", { V dy = k.in(0), y = k.in(1); return dy * (k.c(1) - y * y); });
ROW(r_mish, "mish", { V x = k.in(0); return x * f(L::tanh, f(L::log1p, f(L::exp, x))); });
ROW(r_mish_backward, "mish_backward", {
  V dy = k.in(0), x = k.in(1);
  V t = f(L::tanh, f(L::log1p, f(L::exp, x)));
  return dy * (t + x * f(L::sigmoid, x) * (k.c(1) - t * t)); });
ROW(r_softplus, "softplus", {
  V x = k.in(0), beta = k.number(0);
  V z = x * beta;
  return where(z > k.number(1), x, f(L::log1p, f(L::exp, z)) / beta); });
ROW(r_softplus_backward, "softplus_backward", {
  V dy = k.in(0), x = k.in(1);
  V scaled = x * k.number(0);
  V z = f(L::exp, scaled);
  return where(scaled > k.number(1), dy, dy * z / (z + k.c(1))); });
ROW(r_elu, "elu", {
  V x = k.in(0), alpha = k.number(0), scale = k.number(1);
  return where(x < k.c(0), f(L::expm1, x * k.number(2)) * (alpha * scale), x * scale); });
ROW(r_elu_result_backward, "elu_backward(result)", {
  V dy = k.in(0), alpha = k.number(0), scale = k.number(1), y = k.in(1);
  return where(y <= k.c(0), dy * k.number(2) * (y + alpha * scale), dy * scale); });
ROW_OR(r_elu_backward, "elu_backward", r_elu_result_backward, {
  V dy = k.in(0), alpha = k.number(0), scale = k.number(1), steep = k.number(2), x = k.in(1);
  return where(x <= k.c(0), dy * steep * (alpha * scale) * f(L::exp, x * steep), dy * scale); });
ROW(r_leaky_relu, "leaky_relu", { V x = k.in(0); return where(x > k.c(0), x, x * k.number(0)); });
ROW(r_leaky_relu_result_backward, "leaky_relu_backward", {
  V dy = k.in(0), x = k.in(1);
  return where(x > k.c(0), dy, dy * k.number(0)); });
constexpr Row r_leaky_relu_backward{.name = "leaky_relu_backward", .lower = r_leaky_relu_result_backward.lower,
                                    .types = kFloats, .other = &r_leaky_relu_result_backward};
ROW(r_hardtanh, "hardtanh", { return f(L::minimum, f(L::maximum, k.in(0), k.number(0)), k.number(1)); });
ROW(r_hardtanh_backward, "hardtanh_backward", {
  V dy = k.in(0), x = k.in(1);
  return where((x <= k.number(0)) | (x >= k.number(1)), k.c(0), dy); });
ROW(r_hardswish, "hardswish", { V x = k.in(0); return x * clamped(k, x + k.c(3), 0, 6) / k.c(6); });
ROW(r_hardswish_backward, "hardswish_backward", {
  V dy = k.in(0), x = k.in(1);
  V inner = dy * (x / k.c(3) + k.c(0.5f));
  return where(x <= k.c(-3), k.c(0), where(x < k.c(3), inner, dy)); });
ROW(r_hardsigmoid, "hardsigmoid", { return clamped(k, k.in(0) + k.c(3), 0, 6) / k.c(6); });
ROW(r_hardsigmoid_backward, "hardsigmoid_backward", {
  V dy = k.in(0), x = k.in(1);
  return where((x > k.c(-3)) & (x < k.c(3)), dy / k.c(6), k.c(0)); });
// clang-format on
#undef ROW
#undef ROW_OR

constexpr Row r_threshold{.name = "threshold",
                          .lower =
                              [](Lowering& l, const Row&) {
                                const Lanes x = l.in(0), value = l.rounded(l.scalar(1));
                                l.out(0,
                                      l.op(L::select, l.op(l.floating() ? L::le : L::ile, x, l.scalar(0)), value, x));
                              },
                          .types = kFloats | kInts};
constexpr Row r_threshold_backward{
    .name = "threshold_backward",
    .lower =
        [](Lowering& l, const Row&) {
          const Lanes dy = l.in(0), x = l.in(1);
          const bool f = l.floating();
          l.out(0, l.op(L::select, l.op(f ? L::le : L::ile, x, l.scalar(0)), f ? l.constant(0.0f) : l.integer(0), dy));
        },
    .types = kFloats | kInts};

// Number 0: 2, by the number of elements if the loss was their mean.
constexpr Row r_mse_backward = floats("mse_loss_backward", [](Lowering& l, const Row&) {
  const Formula k{l};
  l.out(0, k.number(0) * (k.in(1) - k.in(2)) * k.in(0));
});

namespace {

Tensor mse_loss_backward(const Tensor& grad, const Tensor& self, const Tensor& target, int64_t reduction) {
  using Op = at::_ops::mse_loss_backward;
  static OpCounter& count = counter(direct::Direct<Op>::name());
  Arguments arguments(r_mse_backward);
  for (const Tensor* t : {&grad, &self, &target}) arguments.tensor(*t);
  const double scale = reduction == at::Reduction::Mean ? 2.0 / static_cast<double>(self.numel()) : 2.0;
  arguments.number(scale);
  Tensor out;
  if (grad.dtype() == self.dtype() && self.sizes() == target.sizes() && arguments.record(count, out)) return out;
  return direct::Direct<Op>::call(grad, self, target, reduction);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("mse_loss_backward", TORCH_FN(mse_loss_backward));
#define OP(op, row) m.impl(direct::Direct<at::_ops::op>::name().c_str(), TORCH_FN((Typed<at::_ops::op, row>::call)));
#define UNARY(op) OP(op, r_##op) OP(op##_, r_##op) OP(op##_out, r_##op)
#define BACKWARD(op) OP(op##_backward, r_##op##_backward) OP(op##_backward_grad_input, r_##op##_backward)
  // clang-format off
  OP(relu, r_relu) OP(relu_, r_relu) OP(relu_out, r_relu) UNARY(gelu) BACKWARD(gelu) UNARY(silu) BACKWARD(silu)
  BACKWARD(sigmoid) BACKWARD(tanh) UNARY(mish) OP(mish_backward, r_mish_backward) OP(softplus, r_softplus) OP(softplus_out, r_softplus) BACKWARD(softplus)
  UNARY(elu) BACKWARD(elu) UNARY(leaky_relu) BACKWARD(leaky_relu) UNARY(hardtanh) BACKWARD(hardtanh) UNARY(hardswish)
  OP(hardswish_backward, r_hardswish_backward) UNARY(hardsigmoid) BACKWARD(hardsigmoid) UNARY(threshold)
  BACKWARD(threshold)
  // clang-format on
#undef BACKWARD
#undef UNARY
#undef OP
}

}  // namespace neuron::fusion
