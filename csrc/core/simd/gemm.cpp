// The inner kernel of matmul, compiled once per level; here contraction to FMA is wanted (TensorE accumulates in fp32).
#include <cstdint>

#include "gemm_tiles.h"
#include "kernels.h"

namespace neuron::NEURON_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 12;
#elif defined(__AVX__)
constexpr int kBytes = 32, kRows = 6;
#else
constexpr int kBytes = 16, kRows = 6;
#endif
constexpr int kVectors = 2, kLanes = kBytes / 4, kColumns = kVectors * kLanes;
typedef float Vec __attribute__((vector_size(kBytes), aligned(4), may_alias));

// kRows x kColumns of c; `add`: on top of what c holds.
inline void micro(const float* a, const float* b, int64_t k, float* c, int64_t ldc, bool add) {
  Vec acc[kRows][kVectors] = {};
  for (int64_t i = 0; i < k; ++i, a += kRows, b += kColumns) {
    Vec y[kVectors];
    for (int v = 0; v < kVectors; ++v) y[v] = *reinterpret_cast<const Vec*>(b + v * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] += a[r] * y[v];
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      Vec* to = reinterpret_cast<Vec*>(c + r * ldc + v * kLanes);
      *to = add ? *to + acc[r][v] : acc[r][v];
    }
}

}  // namespace

extern const int64_t kTileM = kRows, kTileN = kColumns;

void gemm(const float* a, const float* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc, bool add) {
  gemm_tiles<kRows, kColumns>(micro, a, b, k, m, n, c, ldc, add);
}

}  // namespace neuron::NEURON_LEVEL
