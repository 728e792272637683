// Rows: whole optimizer steps on lists of tensors, by the formulas of PyTorch's fused kernels.
//
// Step counters are tensors on the device, one for each parameter. What follows from them alone, the corrections of the
// bias, is computed in lanes: 1 - beta^step as -expm1(step * log(beta)), which loses nothing where beta^step is near 1.
#include <array>
#include <cmath>
#include <utility>

#include "formula.h"
#include "operator.h"
#include "record_list.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;
using at::TensorList;

template <class F, int... I>
constexpr auto rows(F row, std::integer_sequence<int, I...>) {
  return std::array{row(std::integral_constant<int, I>())...};
}

// ---- Adam ----------------------------------------------------------------------------------------------------------
// Forms of a step, as bits. kDecoupled: AdamW's decay of weights; kTensorRate: the learning rate is a tensor.
enum Adam : int { kDecay = 1, kDecoupled = 2, kMaximum = 4, kAscends = 8, kTensorRate = 16, kAdamForms = 32 };

// Inputs: parameters, gradients, first and second moments, largest second moments, steps, rate. Results: those without
// gradients, steps and rate.
// Numbers: log(beta1), log(beta2), 1 - beta1, beta2, 1 - beta2, epsilon, decay, rate. Decoupled decay with a rate that
// is a number: what is left of a parameter.
template <int Form>
void adam(Lowering& l, const Row&) {
  const Formula k{l};
  constexpr int kSteps = Form & kMaximum ? 5 : 4;
  auto raw = [&](int i) { return V{&l, l.raw(i)}; };
  V p = k.in(0), g = k.in(1), m = k.in(2), v = k.in(3), step = raw(kSteps);
  V rate = Form & kTensorRate ? raw(kSteps + 1) : k.number(7);
  if (Form & kAscends) g = f(L::neg, g);
  if (Form & kDecay) {
    V decay = k.number(6);
    if (!(Form & kDecoupled))
      g = g + p * decay;
    else
      p = p * (Form & kTensorRate ? k.c(1) - rate * decay : decay);
  }
  m = m + (g - m) * k.number(2);
  v = v * k.number(3) + k.number(4) * g * g;
  V second = v;
  if (Form & kMaximum) second = f(L::maximum, k.in(4), v);
  V minus_first = f(L::expm1, step * k.number(0)), correction = f(L::sqrt, f(L::neg, f(L::expm1, step * k.number(1))));
  V denominator = f(L::sqrt, second) / correction + k.number(5);
  k.out(0, p + rate / minus_first * m / denominator);
  k.out(1, m);
  k.out(2, v);
  if (Form & kMaximum) k.out(3, second);
}
constexpr auto r_adam = rows(
    [](auto form) {
      return Row{.name = form() & kDecoupled ? "fused_adamw" : "fused_adam",
                 .lower = adam<form()>,
                 .types = kFloats,
                 .reads_float32 = true};
    },
    std::make_integer_sequence<int, kAdamForms>());

// ---- SGD -----------------------------------------------------------------------------------------------------------
enum Sgd : int { kWeightDecay = 1, kMomentum = 2, kFirst = 4, kNesterov = 8, kUphill = 16, kRate = 32, kSgdForms = 64 };

// Inputs: parameters, gradients, momenta (not of the first step), rate. Results: parameters, momenta.
// Numbers: decay, momentum, 1 - dampening, rate.
template <int Form>
void sgd(Lowering& l, const Row&) {
  const Formula k{l};
  constexpr bool kReadsMomenta = (Form & kMomentum) && !(Form & kFirst);
  V p = k.in(0), g = k.in(1);
  if (Form & kUphill) g = f(L::neg, g);
  if (Form & kWeightDecay) g = g + p * k.number(0);
  if (Form & kMomentum) {
    V m = kReadsMomenta ? k.in(2) * k.number(1) + g * k.number(2) : g;
    k.out(1, m);
    g = Form & kNesterov ? g + m * k.number(1) : m;
  }
  V rate = Form & kRate ? V{&l, l.raw(2 + kReadsMomenta)} : k.number(3);
  k.out(0, p - g * rate);
}
constexpr auto r_sgd = rows(
    [](auto form) { return Row{.name = "fused_sgd", .lower = sgd<form()>, .types = kFloats, .reads_float32 = true}; },
    std::make_integer_sequence<int, kSgdForms>());

// ---- recording -----------------------------------------------------------------------------------------------------
bool given(const std::optional<Tensor>& t) { return t && t->defined(); }

// A learning rate: a number, or a tensor that is one if it lies on the host.
struct Rate {
  std::optional<double> number;
  const Tensor* tensor = nullptr;
  explicit Rate(double rate) : number(rate) {}
  explicit Rate(const Tensor& rate) {
    if (const auto value = host_number(rate))
      number = value->toDouble();
    else
      tensor = &rate;
  }
};

template <class Op, int Kind, class LearningRate>
void adam_step(TensorList self, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
               TensorList max_exp_avg_sqs, TensorList state_steps, LearningRate lr, double beta1, double beta2,
               double weight_decay, double eps, bool amsgrad, bool maximize, const std::optional<Tensor>& grad_scale,
               const std::optional<Tensor>& found_inf) {
  const Rate rate(lr);
  const int form = Kind | (weight_decay != 0 ? kDecay : 0) | (amsgrad ? kMaximum : 0) | (maximize ? kAscends : 0) |
                   (rate.tensor ? kTensorRate : 0);
  if (!given(grad_scale) && !given(found_inf)) {
    ListCall list(r_adam[static_cast<size_t>(form)]);
    list.list(self, true);
    list.list(grads, false);
    list.list(exp_avgs, true);
    list.list(exp_avg_sqs, true);
    if (amsgrad) list.list(max_exp_avg_sqs, true);
    list.steps(state_steps);
    if (rate.tensor) list.tensor(*rate.tensor);
    const double left = (Kind & kDecoupled) && rate.number ? 1 - *rate.number * weight_decay : weight_decay;
    for (double n : {std::log(beta1), std::log(beta2), 1 - beta1, beta2, 1 - beta2, eps, left, rate.number.value_or(0)})
      list.number(n);
    if (list.record(counter_of<Op>(), nullptr)) return;
  }
  direct::Direct<Op>::boxed(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2,
                            weight_decay, eps, amsgrad, maximize, grad_scale, found_inf);
}

template <class Op, class LearningRate>
void sgd_step(TensorList self, TensorList grads, TensorList momenta, double weight_decay, double momentum,
              LearningRate lr, double dampening, bool nesterov, bool maximize, bool is_first_step,
              const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  const Rate rate(lr);
  const int form = (weight_decay != 0 ? kWeightDecay : 0) | (momentum != 0 ? kMomentum : 0) |
                   (is_first_step ? kFirst : 0) | (nesterov ? kNesterov : 0) | (maximize ? kUphill : 0) |
                   (rate.tensor ? kRate : 0);
  if (!given(grad_scale) && !given(found_inf)) {
    ListCall list(r_sgd[static_cast<size_t>(form)]);
    list.list(self, true);
    list.list(grads, false);
    if (momentum != 0) list.list(momenta, true, !is_first_step);
    if (rate.tensor) list.tensor(*rate.tensor);
    for (double n : {weight_decay, momentum, 1 - dampening, rate.number.value_or(0)}) list.number(n);
    if (list.record(counter_of<Op>(), nullptr)) return;
  }
  direct::Direct<Op>::boxed(self, grads, momenta, weight_decay, momentum, lr, dampening, nesterov, maximize,
                            is_first_step, grad_scale, found_inf);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_adam_", TORCH_FN((adam_step<at::_ops::_fused_adam_, 0, double>)));
  m.impl("_fused_adam_.tensor_lr", TORCH_FN((adam_step<at::_ops::_fused_adam__tensor_lr, 0, const Tensor&>)));
  m.impl("_fused_adamw_", TORCH_FN((adam_step<at::_ops::_fused_adamw_, kDecoupled, double>)));
  m.impl("_fused_adamw_.tensor_lr",
         TORCH_FN((adam_step<at::_ops::_fused_adamw__tensor_lr, kDecoupled, const Tensor&>)));
  m.impl("_fused_sgd_", TORCH_FN((sgd_step<at::_ops::_fused_sgd_, double>)));
  m.impl("_fused_sgd_.tensor_lr", TORCH_FN((sgd_step<at::_ops::_fused_sgd__tensor_lr, const Tensor&>)));
}

}  // namespace neuron::fusion
