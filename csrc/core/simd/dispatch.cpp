#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "lanes.h"

namespace neuron {

#define DECLARE(LEVEL)             \
  namespace LEVEL {                \
  const Kernels& table();          \
  const LaneKernels& lane_table(); \
  }
DECLARE(baseline)
#ifdef NEURON_X86_LEVELS
DECLARE(avx2)
DECLARE(avx512)
#endif
#undef DECLARE
#ifdef NEURON_X86_LEVELS
namespace avx512 {
void gemm_bf16(const uint32_t* a, const uint32_t* b, int64_t k, int64_t m, int64_t n, float* c, int64_t ldc, bool add);
}
#endif

namespace {

struct Level {
  Kernels kernels;
  const LaneKernels& lanes;
};

// The level of that name, or the best of the machine's below it; without a name the best.
Level choose([[maybe_unused]] const char* wanted) {
#ifdef NEURON_X86_LEVELS
  auto may = [&](const char* level) { return !wanted || std::strcmp(wanted, level) == 0; };
  if (may("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    Level l{avx512::table(), avx512::lane_table()};
    if (__builtin_cpu_supports("avx512bf16")) l.kernels.gemm_bf16 = avx512::gemm_bf16;
    return l;
  }
  if ((may("avx2") || may("avx512")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return {avx2::table(), avx2::lane_table()};
#endif
  return {baseline::table(), baseline::lane_table()};
}

const Level& level() {
  static const Level l = choose(std::getenv("NEURON_SIMD"));
  return l;
}

}  // namespace

const Kernels& kernels() { return level().kernels; }
const LaneKernels& lane_kernels() { return level().lanes; }
const LaneKernels& lane_kernels(const char* name) { return choose(name).lanes; }

}  // namespace neuron
