// Where the operands of tile programs lie, for tests.
#pragma once
#include <algorithm>
#include <vector>

#include "tile_program.h"

inline neuron::TileAccess pattern(void* base, const std::vector<int64_t>& size, const std::vector<int64_t>& stride) {
  neuron::TileAccess a;
  a.base = static_cast<char*>(base);
  a.ndim = static_cast<int>(size.size());
  std::copy(size.begin(), size.end(), a.size);
  std::copy(stride.begin(), stride.end(), a.stride);
  return a;
}
inline neuron::TileAccess contiguous(void* base, int64_t n) { return pattern(base, {n}, {1}); }
