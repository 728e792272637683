// Vector kernels against scalar statements of what they compute.
#include "simd/kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

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

}  // namespace

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
