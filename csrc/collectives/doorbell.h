// A word in shared memory that its owner sleeps on and peers ring. No torch here.
#pragma once

#include <atomic>
#include <cstdint>

namespace neuron::collectives {

class alignas(64) Doorbell {
 public:
  // For whoever changed something the owner may wait for, after the change: wakes the owner if it sleeps.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_relaxed)) wake();
  }
  // For the owner: announce(), look once more at what it waits for, then sleep() or stay_awake().
  uint32_t announce() {
    sleeping_.store(1, std::memory_order_relaxed);
    uint32_t seen = rings_.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return seen;
  }
  void stay_awake() { sleeping_.store(0, std::memory_order_relaxed); }
  // Returns after a ring since announce(), or after `ns` nanoseconds.
  void sleep(uint32_t seen, int64_t ns);

 private:
  void wake();
  std::atomic<uint32_t> rings_{0}, sleeping_{0};
};

}  // namespace neuron::collectives
