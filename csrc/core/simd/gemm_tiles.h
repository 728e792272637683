// A product of packed panels, tile by tile.
#pragma once
#include <cstdint>

namespace neuron::NEURON_LEVEL {

// micro(a, b, k, c, ldc, add) makes a kRows x kColumns tile; at the edges it goes to a buffer first.
template <int kRows, int kColumns, class T, class Micro>
inline void gemm_tiles(Micro micro, const T* a, const T* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc,
                       bool add) {
  for (int64_t j = 0; j < n; j += kColumns)
    for (int64_t i = 0; i < m; i += kRows) {
      const T *pa = a + i * k, *pb = b + j * k;
      const int64_t rows = m - i < kRows ? m - i : kRows, columns = n - j < kColumns ? n - j : kColumns;
      if (rows == kRows && columns == kColumns) {
        micro(pa, pb, k, c + i * ldc + j, ldc, add);
        continue;
      }
      float edge[kRows * kColumns];
      micro(pa, pb, k, edge, kColumns, false);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t q = 0; q < columns; ++q) {
          float& to = c[(i + r) * ldc + j + q];
          to = add ? to + edge[r * kColumns + q] : edge[r * kColumns + q];
        }
    }
}

}  // namespace neuron::NEURON_LEVEL
