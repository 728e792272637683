// Rows: random operators.
//
// Rule: random numbers. A random operator takes its Philox counters from the device's generator when it is called. Bit
// pattern i of a node is word i % 4 of Philox4x32-10 with the generator's seed as key at counter offset + i / 4; i
// counts the elements in the order of the result's memory. A captured graph takes counters anew at each replay.
//
// Reason: numbers must depend on the seed and the order of calls, not on windows, tiles or threads.
//
// Rule: fills. A fill with random numbers closes the window.
//
// Reason: its result is stored in any case, and a chain is then the same program whether its inputs were drawn just
// before or are old.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "aten/graph.h"
#include "formula.h"
#include "operator.h"
#include "record.h"
#include "runtime/generator.h"
#include "window.h"

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

// Bits of a significand: uniform numbers are multiples of 2 to the minus that power, as on PyTorch's CPU.
int digits(Dtype t) { return t == Dtype::bfloat16 ? 8 : t == Dtype::float16 ? 11 : 24; }
// Numbers: seed and offset (4), lower end, length.
constexpr Row r_uniform{.name = "uniform",
                        .lower =
                            [](Lowering& l, const Row&) {
                              const Formula k{l};
                              const int n = digits(l.compute());
                              const Lanes bits =
                                  l.op(L::iand, l.op(L::uniform_bits, l.seed(0)), l.integer((1 << n) - 1));
                              V u = V{&l, l.op(L::to_float, bits)} * k.c(std::ldexp(1.0f, -n));
                              k.out(0, u * k.number(5) + k.number(4));
                            },
                        .types = kFloats,
                        .overwrites = true};

V polynomial(const Formula& k, V x, std::initializer_list<float> from_highest) {
  auto c = from_highest.begin();
  V p = k.c(*c);
  while (++c != from_highest.end()) p = p * x + k.c(*c);
  return p;
}
// Inverse of the error function, in single precision, by M. Giles's approximation ("Approximating the erfinv
// function", 2010): polynomials in the logarithm of the distance from the ends.
V erfinv(const Formula& k, V x) {
  V w = f(L::neg, f(L::log, (k.c(1) - x) * (k.c(1) + x)));
  V middle = polynomial(k, w - k.c(2.5f),
                        {2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f, 0.00021858087f,
                         -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f});
  V tail = polynomial(k, f(L::sqrt, w) - k.c(3),
                      {-0.000200214257f, 0.000100950558f, 0.00134934322f, -0.00367342844f, 0.00573950773f,
                       -0.0076224613f, 0.00943887047f, 1.00167406f, 2.83297682f});
  return where(w < k.c(5), middle, tail) * x;
}

// Numbers: seed and offset (4), mean, standard deviation times the root of 2.
constexpr Row r_normal{.name = "normal",
                       .lower =
                           [](Lowering& l, const Row&) {
                             const Formula k{l};
                             // Odd multiples of 2^-24 between -1 and 1.
                             const Lanes bits = l.op(L::iand, l.op(L::uniform_bits, l.seed(0)), l.integer(~0xff));
                             V u = V{&l, l.op(L::to_float, bits)} * k.c(0x1p-31f) + k.c(0x1p-24f);
                             k.out(0, erfinv(k, u) * k.number(5) + k.number(4));
                           },
                       .types = kFloats,
                       .overwrites = true};

// Numbers: seed and offset (4), the largest of 2^31 patterns that gives 1.
constexpr Row r_bernoulli{.name = "bernoulli",
                          .lower =
                              [](Lowering& l, const Row&) {
                                const Lanes bits =
                                    l.op(L::iand, l.op(L::uniform_bits, l.seed(0)), l.integer(INT32_MAX));
                                const Lanes last{l.scalar(4).id, false};
                                l.out(0, l.convert(l.op(L::ile, bits, last), Dtype::boolean, l.compute()));
                              },
                          .overwrites = true};

// ---- recording -----------------------------------------------------------------------------------------------------
// The largest of 2^31 patterns that an event of this probability, above 0, takes.
uint32_t last_pattern(double p) { return lane(static_cast<int32_t>(static_cast<int64_t>(p * 2147483648.0) - 1)); }

// Records a call whose first numbers are seed and offset, one random word for each element of `like`. The generator
// stays as it was if the call cannot be recorded.
bool draw(Call& call, const Tensor& like, const std::optional<at::Generator>& given, Tensor& out) {
  NeuronGenerator& generator = generator_or_default(given, like.device().index());
  if (Capture* capture = current_capture()) capture->remember_generator(given, like.device().index());
  const uint64_t before = generator.get_offset();
  call.generator = &generator;
  call.counters = static_cast<uint64_t>(like.numel() + 3) / 4;
  const auto [seed, offset] = generator.reserve(call.counters);
  const uint32_t words[] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                            static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
  call.scalars.insert(call.scalars.begin(), std::begin(words), std::end(words));
  if (record_pointwise(call, out)) return true;
  generator.set_offset(before);
  return false;
}

// Fills a tensor in place.
bool fill(const Row& row, OpCounter& count, Tensor& self, const std::optional<at::Generator>& generator,
          std::initializer_list<uint32_t> numbers) {
  const auto type = self.scalar_type();
  Call call{row, count, type, type, {}, numbers};
  if (!draw(call, self, generator, self)) return false;
  Window::current(self.device().index()).flush();
  return true;
}

Tensor& uniform_(Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  using Op = at::_ops::uniform_;
  const double largest = self.scalar_type() == at::kHalf ? 65504 : std::numeric_limits<float>::max();
  if (from >= -largest && from <= to && to <= largest && to - from <= largest && usable(self) &&
      c10::isFloatingType(self.scalar_type()) &&
      fill(r_uniform, counter_of<Op>(), self, generator,
           {lane(static_cast<float>(from)), lane(static_cast<float>(to - from))}))
    return self;
  return direct::Direct<Op>::boxed(self, from, to, std::move(generator));
}

Tensor& normal_(Tensor& self, double mean, double std, std::optional<at::Generator> generator) {
  using Op = at::_ops::normal_;
  if (std >= 0 && usable(self) && c10::isFloatingType(self.scalar_type()) &&
      fill(r_normal, counter_of<Op>(), self, generator,
           {lane(static_cast<float>(mean)), lane(static_cast<float>(std * std::sqrt(2.0)))}))
    return self;
  return direct::Direct<Op>::boxed(self, mean, std, std::move(generator));
}

Tensor& bernoulli_(Tensor& self, double p, std::optional<at::Generator> generator) {
  using Op = at::_ops::bernoulli__float;
  if (p > 0 && p <= 1 && usable(self) && fill(r_bernoulli, counter_of<Op>(), self, generator, {last_pattern(p)}))
    return self;
  return direct::Direct<Op>::boxed(self, p, std::move(generator));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  if (p == 1.0) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  static OpCounter& count = counter("aten::native_dropout");
  const double scale = 1.0 / (1.0 - p);
  if (usable(input) && c10::isFloatingType(input.scalar_type())) {
    const auto type = input.scalar_type();
    Tensor out, mask;
    Call call{r_dropout, count,    type,
              type,      {&input}, {last_pattern(1.0 - p), lane(static_cast<float>(scale))},
              0,         &mask,    c10::ScalarType::Bool};
    if (draw(call, input, std::nullopt, out)) return {out, mask};
  }
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1.0 - p);
  return {input.mul(mask).mul_(scale), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("uniform_", TORCH_FN(uniform_));
  m.impl("normal_", TORCH_FN(normal_));
  m.impl("bernoulli_.float", TORCH_FN(bernoulli_));
}

}  // namespace neuron::fusion
