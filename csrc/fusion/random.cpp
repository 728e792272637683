// Rows: random operators.
//
// Rule: random numbers. A random operator takes its Philox counters from the device's generator when it is called. Bit
// pattern i of a node is word i % 4 of Philox4x32-10 with the generator's seed as key at counter offset + i / 4; i
// counts the elements in the order of the result's memory.
//
// Reason: numbers must depend on the seed and the order of calls, not on windows, tiles or threads.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "aten/graph.h"
#include "record.h"
#include "runtime/generator.h"

namespace neuron::fusion {

namespace {

using L = LaneOp;

// Numbers: seed and offset (4), the largest of 2^31 patterns that keeps an element, the scale of what is kept.
constexpr Row r_dropout{.name = "dropout",
                        .lower =
                            [](Lowering& l, const Row&) {
                              const Lanes x = l.in(0);
                              const Lanes bits = l.op(L::iand, l.op(L::uniform_bits, l.seed(0)), l.integer(INT32_MAX));
                              const Lanes last{l.scalar(4).id, false};
                              const Lanes keep = l.op(L::ile, bits, last);
                              const Lanes kept = l.op(L::mul, x, l.scalar(5));
                              l.out(0, l.op(L::select, keep, kept, l.constant(0.0f)));
                              l.out(1, keep, Dtype::boolean);
                            },
                        .types = kFloats};

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  if (p == 1.0) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  static OpCounter& count = counter("aten::native_dropout");
  const double scale = 1.0 / (1.0 - p);
  if (usable(input) && !current_capture() && c10::isFloatingType(input.scalar_type())) {
    NeuronGenerator& generator = generator_or_default(std::nullopt, input.device().index());
    const uint64_t before = generator.get_offset();
    const auto [seed, offset] = generator.reserve(static_cast<uint64_t>(input.numel() + 3) / 4);
    const auto type = input.scalar_type();
    Tensor out, mask;
    const int64_t keep = static_cast<int64_t>((1.0 - p) * 2147483648.0) - 1;
    const Call call{
        r_dropout,
        count,
        type,
        type,
        {&input},
        {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(offset),
         static_cast<uint32_t>(offset >> 32), lane(static_cast<int32_t>(keep)), lane(static_cast<float>(scale))},
        0,
        &mask,
        c10::ScalarType::Bool};
    if (record_pointwise(call, out)) return {out, mask};
    generator.set_offset(before);
  }
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1.0 - p);
  return {input.mul(mask).mul_(scale), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", TORCH_FN(native_dropout)); }

}  // namespace neuron::fusion
