// Kernels of the lane operations, compiled once per instruction-set level.
#pragma once
#include <array>
#include <cstdint>

#include "../lane_ops.h"

namespace neuron {

// What a kernel runs over: rows of n lanes; pitches are bytes from row to row.
struct LaneRows {
  int64_t n;
  int64_t index = 0;  // of the first element in the tensor, for uniform_bits
  int64_t rows = 1;
  int64_t out_pitch = 0, pitch[3] = {0, 0, 0};
  const char* const* places[3] = {};  // where each row of an input is, if they do not lie a pitch apart

  const char* input(int k, const void* first, int64_t row) const {
    return places[k] ? places[k][row] : static_cast<const char*>(first) + row * pitch[k];
  }
};

struct LaneKernels {
  // out[i] = op(a[i], b[i], c[i]) in each row. Bit k of `vectors` says that input k has n lanes in a row, else it has
  // one for all. `out` may be one of the inputs.
  using Map = void (*)(void* out, const void* a, const void* b, const void* c, int vectors, const LaneRows& rows);
  // One lane from the n of each row, rows `pitch` bytes apart. The tree depends on n alone.
  using Reduce = void (*)(void* out, const void* a, int64_t n, int64_t rows, int64_t pitch);
  std::array<Map, kLaneOps> map;
  std::array<Reduce, kLaneOps> reduce;
  // On AVX-512 machines: out[i] = op(a[i], b[i], c[i]) of kCallLanes lanes.
  static constexpr int kCallLanes = 64;
  using Call = void (*)(void* out, const void* a, const void* b, const void* c);
  std::array<Call, kLaneOps> call;
};

const LaneKernels& lane_kernels();
const LaneKernels& lane_kernels(
    const char* level);  // baseline, avx2 or avx512; a lower one if the machine has not that

}  // namespace neuron
