// Kernels of the lane operations, compiled once per instruction-set level.
#pragma once
#include <array>
#include <cstdint>

#include "../lane_ops.h"

namespace neuron {

struct LaneKernels {
  // out[i] = op(a[i], b[i], c[i]) for i < n. Bit k of `vectors` says that input k has n lanes, else it has one for all.
  // `out` may be one of the inputs. `index`: number of the first element in the tensor, for uniform_bits.
  using Map = void (*)(void* out, const void* a, const void* b, const void* c, int vectors, int64_t n, int64_t index);
  // One lane from n. The tree depends on n alone.
  using Reduce = void (*)(void* out, const void* a, int64_t n);
  std::array<Map, kLaneOps> map;
  std::array<Reduce, kLaneOps> reduce;
};

const LaneKernels& lane_kernels();

}  // namespace neuron
