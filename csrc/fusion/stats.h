// Counters of fusion, for torch.neuron.fusion_stats().
#pragma once

#include <atomic>
#include <cstdint>

namespace neuron::fusion {

// X(name): each counts since the last reset.
#define NEURON_FUSION_COUNTERS(X)                                           \
  X(ops_recorded)   /* fusible operators called */                          \
  X(ops_fused)      /* of them, those that shared a program with another */ \
  X(library_calls)  /* operators that ran PyTorch's CPU kernel */           \
  X(programs_built) /* programs made, not found in the cache */             \
  X(programs_run)                                                           \
  X(stores_elided)   /* results that were never written */                  \
  X(executables_run) /* calls of what torch.compile made */

struct Stats {
#define X(name) std::atomic<uint64_t> name{0};
  NEURON_FUSION_COUNTERS(X)
#undef X
};
inline Stats g_stats;
inline void count(std::atomic<uint64_t>& counter, uint64_t n = 1) { counter.fetch_add(n, std::memory_order_relaxed); }

}  // namespace neuron::fusion
