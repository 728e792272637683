// Vector kernels against scalar statements of what they compute.
#include "simd/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "simd/lanes.h"

using namespace neuron;

namespace {

std::vector<float> uniform(size_t n, float low, float high, uint64_t seed) {
  std::mt19937_64 r(seed);
  std::uniform_real_distribution<float> d(low, high);
  std::vector<float> v(n);
  for (float& x : v) x = d(r);
  return v;
}

// Largest error of a function in units of the last place of the right value, but at least of `floor`.
double error(Function f, double (*truth)(double), float low, float high, double floor) {
  const auto x = uniform(20000, low, high, 1);
  std::vector<float> y(x.size());
  kernels().function[static_cast<int>(f)](x.data(), 0, y.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = truth(x[i]);
    const double ulp = std::max(std::ldexp(1.0, std::ilogb(want == 0 ? floor : want) - 23), floor);
    worst = std::max(worst, std::fabs(y[i] - want) / ulp);
  }
  return worst;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<float> kEdges = {
    0.0f,    -0.0f,        1.0f,         -1.0f,        0.5f,        -0.5f,      2.0f,          -2.0f,
    3.0f,    -3.0f,        2.5f,         -2.5f,        1e-40f,      -1e-40f,    0x1p-149f,     -0x1p-149f,
    1e30f,   -1e30f,       3.4e38f,      -3.4e38f,     kInfinity,   -kInfinity, NAN,           0x1p-126f,
    88.7f,   89.3f,        -103.9f,      -150.5f,      128.0f,      -149.5f,    0x1.fffffep-1, 0x1.000002p0,
    8388607, -8388607.5f,  16777217.0f,  -33554431.0f, 1e9f,        2e5f,       -1e-5f,        0.25f,
    8.0f,    0x1.921fb6p0, 0x1.921fb6p1, 10.05f,       4194303.75f, 65504.0f,   65520.0f,      -0x1p-25f};

std::vector<float> apply(LaneOp op, const std::vector<float>& a, const std::vector<float>& b,
                         const LaneKernels& kernels = lane_kernels()) {
  std::vector<float> out(a.size());
  kernels.map[static_cast<int>(op)](out.data(), a.data(), b.data(), b.data(), 7,
                                    LaneRows{static_cast<int64_t>(a.size())});
  return out;
}

// The distance of a result from the right value in units of the last place of that; infinite where one is special and
// the other is not.
double distance(float got, double want) {
  const auto rounded = static_cast<float>(want);
  if (std::isnan(rounded) || std::isnan(got)) return std::isnan(rounded) == std::isnan(got) ? 0 : kInfinity;
  if (got == rounded) return std::signbit(got) == std::signbit(rounded) ? 0 : kInfinity;
  if (std::isinf(got) || std::isinf(rounded)) return kInfinity;
  return std::fabs(got - want) / std::ldexp(1.0, std::max(want == 0 ? -126 : std::ilogb(want), -126) - 23);
}

struct LaneFunction {
  LaneOp op;
  double (*truth)(double);
  double bound;  // of the error in units of the last place
};
const LaneFunction kLaneFunctions[] = {
    {LaneOp::exp, std::exp, 1},        {LaneOp::exp2, std::exp2, 1},   {LaneOp::expm1, std::expm1, 1.5},
    {LaneOp::log1p, std::log1p, 1.5},  {LaneOp::log2, std::log2, 2},   {LaneOp::log10, std::log10, 2},
    {LaneOp::tanh, std::tanh, 1.5},    {LaneOp::erf, std::erf, 2.6},   {LaneOp::erfc, std::erfc, 5.5},
    {LaneOp::sin, std::sin, 1},        {LaneOp::cos, std::cos, 1},     {LaneOp::tan, std::tan, 2.5},
    {LaneOp::asin, std::asin, 2.5},    {LaneOp::acos, std::acos, 1.5}, {LaneOp::atan, std::atan, 1.5},
    {LaneOp::sinh, std::sinh, 3},      {LaneOp::cosh, std::cosh, 2.5}, {LaneOp::floor, std::floor, 0},
    {LaneOp::round, std::nearbyint, 0}};

double power(double a, double b) { return std::pow(a, b); }
double angle(double a, double b) { return std::atan2(a, b); }
double rest(double a, double b) { return std::fmod(a, b); }
double signed_rest(double a, double b) {
  const double r = std::fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? static_cast<double>(static_cast<float>(r) + static_cast<float>(b)) : r;
}
struct LaneFunctionOfTwo {
  LaneOp op;
  double (*truth)(double, double);
  double bound;
};
const LaneFunctionOfTwo kLaneFunctionsOfTwo[] = {
    {LaneOp::pow, power, 1}, {LaneOp::atan2, angle, 1.6}, {LaneOp::fmod, rest, 0}, {LaneOp::remainder, signed_rest, 0}};

// Floats of all magnitudes; a NaN is one that operations give.
std::vector<float> any_floats(size_t n, uint64_t seed) {
  std::mt19937_64 r(seed);
  std::vector<float> v(n);
  for (float& x : v) {
    const auto bits = static_cast<uint32_t>(r());
    std::memcpy(&x, &bits, 4);
    if (std::isnan(x)) x = NAN;
  }
  return v;
}
std::vector<float> with_edges(std::vector<float> v) {
  v.insert(v.end(), kEdges.begin(), kEdges.end());
  return v;
}
// Every pair of edges, random pairs, and pairs whose powers are finite.
std::pair<std::vector<float>, std::vector<float>> pairs() {
  auto a = any_floats(20000, 1), b = any_floats(20000, 2);
  for (float x : kEdges)
    for (float y : kEdges) a.push_back(x), b.push_back(y);
  for (float x : uniform(20000, -20, 20, 3)) a.push_back(x);
  for (float y : uniform(20000, -20, 20, 4)) b.push_back(y);
  const auto exponents = uniform(40000, -87, 87, 5), near = uniform(20000, 0.9f, 1.1f, 6);
  for (size_t i = 0; i < 40000; ++i) {
    a.push_back(std::fabs(i < 20000 ? a[i] : near[i - 20000]));
    b.push_back(exponents[i] / std::log(a.back()));
  }
  return {a, b};
}

}  // namespace

TEST(lane_functions_are_within_a_few_units_of_the_last_place) {
  for (const auto& f : kLaneFunctions)
    for (auto x : {with_edges(any_floats(100000, 1)), uniform(50000, -1, 1, 2), uniform(50000, -100, 100, 3)}) {
      const auto y = apply(f.op, x, x);
      for (size_t i = 0; i < x.size(); ++i) {
        if (!(distance(y[i], f.truth(x[i])) <= f.bound))
          check::fail(__FILE__, __LINE__, info(f.op).name, "(", x[i], ") is ", y[i]);
      }
    }
  const auto [a, b] = pairs();
  for (const auto& f : kLaneFunctionsOfTwo) {
    const auto y = apply(f.op, a, b);
    for (size_t i = 0; i < a.size(); ++i)
      if (!(distance(y[i], f.truth(a[i], b[i])) <= f.bound))
        check::fail(__FILE__, __LINE__, info(f.op).name, "(", a[i], ", ", b[i], ") is ", y[i]);
  }
}

TEST(instruction_set_levels_have_the_same_bits) {
  const auto [a, b] = pairs();
  for (int i = 0; i < kLaneOps; ++i) {
    const auto op = static_cast<LaneOp>(i);
    if (reduces(op) || op == LaneOp::uniform_bits) continue;
    auto second = b;
    if (info(op).in == Lane::i32)
      for (float& x : second) x = x == 0.0f ? 1.0f : x;  // a divisor
    const auto want = apply(op, a, second, lane_kernels("baseline"));
    for (const char* level : {"avx2", "avx512"}) {
      const auto got = apply(op, a, second, lane_kernels(level));
      for (size_t k = 0; k < a.size(); ++k)
        if (std::memcmp(&got[k], &want[k], 4) != 0)
          check::fail(__FILE__, __LINE__, level, " ", info(op).name, "(", a[k], ", ", second[k], ") is ", got[k],
                      ", not ", want[k]);
    }
  }
}

TEST(functions_are_within_a_few_units_of_the_last_place) {
  CHECK(error(Function::exp, std::exp, -87, 88, 1e-37) < 2.5);
  CHECK(error(Function::log, std::log, 1e-6f, 100, 1e-8) < 3);
  CHECK(error(Function::tanh, std::tanh, -9, 9, 1e-9) < 4);
  CHECK(error(Function::erf, std::erf, -4, 4, 1e-9) < 4);
  CHECK(error(Function::sin, std::sin, -3.14f, 3.14f, 1.2e-7) < 3);
  CHECK(error(Function::arctan, std::atan, -9, 9, 1e-9) < 2);
  CHECK(error(Function::sqrt, std::sqrt, 0, 100, 1e-9) <= 0.5001);
}

TEST(reductions_follow_one_tree) {
  // 32 running lanes, folded in halves: written out here without vectors.
  for (int64_t n : {0, 1, 5, 31, 32, 33, 64, 100, 1000, 4097}) {
    const auto x = uniform(n, -1, 1, n);
    float lane[32] = {};
    for (int64_t i = 0; i < n; ++i) lane[i % 32] += x[i];
    for (int w = 16; w; w /= 2)
      for (int j = 0; j < w; ++j) lane[j] += lane[j + w];
    CHECK_EQ(kernels().reduce[static_cast<int>(AluOp::add)](x.data(), n), lane[0]);
  }
}

TEST(maximum_and_minimum_propagate_nan) {
  std::vector<float> x = uniform(100, -1, 1, 3);
  x[57] = NAN;
  CHECK(std::isnan(kernels().reduce[static_cast<int>(AluOp::maximum)](x.data(), 100)));
  CHECK(std::isnan(kernels().reduce[static_cast<int>(AluOp::minimum)](x.data(), 100)));
}

TEST(half_precision_round_trips_and_rounds_to_even) {
  const auto load = kernels().load[static_cast<int>(Dtype::float16)];
  const auto store = kernels().store[static_cast<int>(Dtype::float16)];
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto h = static_cast<uint16_t>(bits);
    float f;
    load(reinterpret_cast<const char*>(&h), 2, 1, &f);
    const int exponent = h >> 10 & 31;
    const double want = (h & 0x8000 ? -1.0 : 1.0) *
                        (exponent ? std::ldexp(1024 + (h & 1023), exponent - 25) : std::ldexp(h & 1023, -24));
    if (exponent < 31) CHECK_EQ(static_cast<double>(f), want);
    if (exponent == 31 && (h & 1023)) continue;
    uint16_t back;
    store(&f, 1, reinterpret_cast<char*>(&back), 2);
    CHECK_EQ(back, h);
  }
  const float halfway[] = {1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f, 65519.0f, 65520.0f, 0x1p-25f, 3 * 0x1p-25f};
  const uint16_t rounded[] = {0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0000, 0x0002};
  for (int i = 0; i < 6; ++i) {
    uint16_t h;
    store(&halfway[i], 1, reinterpret_cast<char*>(&h), 2);
    CHECK_EQ(h, rounded[i]);
  }
}

TEST(gemm_is_the_sum_of_products) {
  const Kernels& k = kernels();
  for (auto [depth, m, n] : {std::array<int64_t, 3>{1, 1, 1}, {3, 7, 19}, {128, 128, 512}, {17, 13, 100}}) {
    const auto a = uniform(depth * m, -1, 1, 1), b = uniform(depth * n, -1, 1, 2);
    auto pack = [&](const std::vector<float>& from, int64_t width, int64_t tile) {
      const int64_t panels = (width + tile - 1) / tile;
      std::vector<float> to(panels * tile * depth, 0.0f);
      for (int64_t p = 0; p < panels; ++p)
        for (int64_t i = 0; i < depth; ++i)
          for (int64_t j = 0; j < tile && p * tile + j < width; ++j)
            to[(p * depth + i) * tile + j] = from[i * width + p * tile + j];
      return to;
    };
    std::vector<float> c(m * n, 1.0f);
    const auto pa = pack(a, m, k.tile_m), pb = pack(b, n, k.tile_n);
    k.gemm(pa.data(), pb.data(), depth, m, n, c.data(), n, true);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double want = 1;
        for (int64_t q = 0; q < depth; ++q) want += static_cast<double>(a[q * m + i]) * b[q * n + j];
        CHECK(std::fabs(c[i * n + j] - want) < 1e-5 * static_cast<double>(depth));
      }
  }
}

TEST(bf16_gemm_is_the_sum_of_products) {
  const Kernels& k = kernels();
  if (!k.gemm_bf16) return;
  for (auto [depth, m, n] : {std::array<int64_t, 3>{1, 1, 1}, {4, 7, 19}, {128, 128, 512}, {18, 13, 100}}) {
    auto rounded = [&](int64_t count, int seed) {
      auto x = uniform(count, -1, 1, seed);
      for (float& v : x) {
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        bits &= 0xffff0000;
        std::memcpy(&v, &bits, 4);
      }
      return x;
    };
    const auto a = rounded(depth * m, 1), b = rounded(depth * n, 2);
    auto pack = [&](const std::vector<float>& from, int64_t width, int64_t tile) {
      const int64_t panels = (width + tile - 1) / tile, pairs = (depth + 1) / 2;
      std::vector<uint32_t> to(panels * tile * pairs, 0);
      for (int64_t i = 0; i < depth; ++i)
        for (int64_t j = 0; j < width; ++j) {
          uint32_t bits;
          std::memcpy(&bits, &from[i * width + j], 4);
          to[(j / tile * pairs + i / 2) * tile + j % tile] |= i % 2 ? bits : bits >> 16;
        }
      return to;
    };
    std::vector<float> c(m * n, 1.0f);
    const auto pa = pack(a, m, k.tile_m), pb = pack(b, n, k.tile_n);
    k.gemm_bf16(pa.data(), pb.data(), (depth + 1) / 2, m, n, c.data(), n, true);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double want = 1;
        for (int64_t q = 0; q < depth; ++q) want += static_cast<double>(a[q * m + i]) * b[q * n + j];
        CHECK(std::fabs(c[i * n + j] - want) < 1e-5 * static_cast<double>(depth));
      }
  }
}
