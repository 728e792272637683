// The inner kernel of matmul for bfloat16 factors, on machines with AVX-512 BF16: a lane adds two products at a time.
#include <immintrin.h>

#include "gemm_tiles.h"
#include "kernels.h"

namespace neuron::NEURON_LEVEL {
namespace {

constexpr int kRows = 12, kVectors = 2, kColumns = 16 * kVectors;  // as gemm's

inline void micro(const uint32_t* a, const uint32_t* b, int64_t k, float* c, int64_t ldc, bool add) {
  __m512 acc[kRows][kVectors];
  for (auto& row : acc)
    for (auto& x : row) x = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, a += kRows, b += kColumns) {
    __m512bh y[kVectors];
    for (int v = 0; v < kVectors; ++v) y[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 16 * v));
    for (int r = 0; r < kRows; ++r) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r])));
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, y[v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * ldc + 16 * v;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), acc[r][v]) : acc[r][v]);
    }
}

}  // namespace

void gemm_bf16(const uint32_t* a, const uint32_t* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc, bool add) {
  gemm_tiles<kRows, kColumns>(micro, a, b, k, m, n, c, ldc, add);
}

}  // namespace neuron::NEURON_LEVEL
