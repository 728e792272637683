// Scaled dot product attention takes the same kernel as on CPU: without a choice here PyTorch would decompose it into
// some fifteen operators.
//
// The kernel has a second name, `_scaled_dot_product_efficient_attention`: DTensor and context parallelism know fused
// attention by the names of CUDA's operators only. Tensor subclasses get that one.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

namespace neuron {

namespace {

// A subclass that PyTorch dispatches to Python and that holds real tensors: not a fake one, whose storage is meta.
bool is_wrapper(const at::Tensor& t) {
  return t.key_set().has(c10::DispatchKey::Python) && !(t.has_storage() && t.storage().device_type() == at::kMeta);
}

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  const int64_t choice = at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, grouped);
  constexpr auto flash = static_cast<int64_t>(at::SDPBackend::flash_attention);
  return choice == flash && is_wrapper(query) ? static_cast<int64_t>(at::SDPBackend::efficient_attention) : choice;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    bool, double dropout, bool causal, std::optional<double> scale) {
  auto [out, log_sum_exp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale);
  // The state of a generator that attention without dropout does not draw from.
  at::Tensor unused = at::empty({}, at::kLong);
  return {out, log_sum_exp, unused, unused};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor&, const at::Tensor&,
    double dropout, std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  TORCH_CHECK(!wanted[3], "The gradient of an attention bias is not known; do not let the bias require one.");
  std::optional<at::Tensor> mask;
  if (bias.defined()) mask = bias;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, log_sum_exp, dropout, causal, mask, scale);
  return {dq, dk, dv, at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
}

}  // namespace neuron

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &neuron::choose_attention)
}  // namespace at::native
