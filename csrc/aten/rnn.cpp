// The fused LSTM and GRU cells that torch.nn's recurrent layers ask accelerators for. CPU has no such kernels, so the
// cells are written out here, with the arithmetic of the CPU's unfused cells.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace neuron {

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

// igates, hgates [batch, 4 * hidden] without biases; cx [batch, hidden]. Returns hy, cy and the activated gates.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& igates, const Tensor& hgates, const Tensor& cx,
                                             const Optional& bias_ih, const Optional& bias_hh) {
  auto gates = with_bias(igates, bias_ih).add(with_bias(hgates, bias_hh)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget.mul(cx).add_(in.mul(cell));
  return {out.mul(cy.tanh()), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor tanh_cy = cy.tanh();
  Tensor grad_cell = at::zeros_like(cx), grad_out = at::zeros_like(cx);
  if (grad_cy && grad_cy->defined()) grad_cell = grad_cell.add(*grad_cy);
  if (grad_hy && grad_hy->defined()) {
    grad_cell = grad_cell.add(at::tanh_backward(grad_hy->mul(out), tanh_cy));
    grad_out = grad_hy->mul(tanh_cy);
  }
  Tensor grad_gates =
      at::cat({at::sigmoid_backward(grad_cell.mul(cell), in), at::sigmoid_backward(grad_cell.mul(cx), forget),
               at::tanh_backward(grad_cell.mul(in), cell), at::sigmoid_backward(grad_out, out)},
              1);
  return {grad_gates, grad_cell.mul(forget), has_bias ? grad_gates.sum(0) : Tensor()};
}

// igates, hgates [batch, 3 * hidden] without biases. Returns hy and what backward needs: r, z, n, hx, hn.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& igates, const Tensor& hgates, const Tensor& hx,
                                    const Optional& bias_ih, const Optional& bias_hh) {
  auto i = with_bias(igates, bias_ih).chunk(3, 1), h = with_bias(hgates, bias_hh).chunk(3, 1);
  Tensor r = h[0].add(i[0]).sigmoid_(), z = h[1].add(i[1]).sigmoid_();
  Tensor n = i[2].add(h[2].mul(r)).tanh_();
  return {hx.sub(n).mul_(z).add_(n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  const Tensor &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3], &hn = saved[4];
  Tensor grad_n = at::tanh_backward(grad_hy.mul(1 - z), n);
  Tensor grad_z = at::sigmoid_backward(grad_hy.mul(hx.sub(n)), z);
  Tensor grad_r = at::sigmoid_backward(grad_n.mul(hn), r);
  Tensor grad_i = at::cat({grad_r, grad_z, grad_n}, 1), grad_h = at::cat({grad_r, grad_z, grad_n.mul(r)}, 1);
  return {grad_i, grad_h, grad_hy.mul(z), has_bias ? grad_i.sum(0) : Tensor(), has_bias ? grad_h.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace neuron
