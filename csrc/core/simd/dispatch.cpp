#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace neuron {

#define DECLARE(LEVEL)    \
  namespace LEVEL {       \
  const Kernels& table(); \
  }
DECLARE(baseline)
#ifdef NEURON_X86_LEVELS
DECLARE(avx2)
DECLARE(avx512)
#endif
#undef DECLARE

namespace {

const Kernels& choose() {
#ifdef NEURON_X86_LEVELS
  const char* wanted = std::getenv("NEURON_SIMD");
  auto may = [&](const char* level) { return !wanted || std::strcmp(wanted, level) == 0; };
  if (may("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512::table();
  if ((may("avx2") || may("avx512")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return avx2::table();
#endif
  return baseline::table();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& k = choose();
  return k;
}

}  // namespace neuron
