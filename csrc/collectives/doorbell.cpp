#include "doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace neuron::collectives {

namespace {
long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}
}  // namespace

void Doorbell::wake() {
  rings_.fetch_add(1, std::memory_order_relaxed);
  // One ring wakes: the owner announces again before it sleeps again.
  if (sleeping_.exchange(0, std::memory_order_relaxed)) futex(&rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

void Doorbell::sleep(uint32_t seen, int64_t ns) {
  timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
  futex(&rings_, FUTEX_WAIT, seen, &timeout);
  stay_awake();
}

}  // namespace neuron::collectives
