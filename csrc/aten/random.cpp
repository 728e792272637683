// Random operators whose schema has no generator.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "library.h"

namespace neuron {

namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  if (p == 1.0) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1.0 - p);
  return {input.mul(mask).mul_(1.0 / (1.0 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", TORCH_FN(native_dropout)); }

}  // namespace neuron
