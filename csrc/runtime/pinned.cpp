#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <unistd.h>

#include "device.h"

namespace neuron {

namespace {

MemoryPool& pool() {
  static auto* p = new MemoryPool(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE));
  return *p;
}
std::atomic<bool> g_used{false};

MemoryPool* owner_of(const void* data) {
  Block* block = MemoryPool::find(data);
  return block ? block->segment->pool : nullptr;
}

void free_pinned(void* context) {
  if (!in_bad_fork()) pool().free(static_cast<Block*>(context));
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    device_state(current_device());  // as on CUDA, pinned memory belongs to a device context
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    g_used = true;
    try {
      Block* block = pool().allocate(bytes, 0);
      return {block->ptr, block, &free_pinned, c10::Device(c10::kCPU)};
    } catch (const PoolExhausted& e) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "Cannot pin ", e.requested, " bytes of host memory: ", e.allocated,
                       " bytes are pinned already and the machine has ", e.capacity, ".");
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { std::memcpy(dst, src, bytes); }
  bool record_event(void* ptr, void* context, c10::Stream stream) override {
    if (!is_pinned_pointer(ptr)) return false;
    pool().record_use(MemoryPool::find(ptr), &queue_of(stream));
    return true;
  }
  void empty_cache() override { pool().empty_cache(); }
  at::HostStats get_stats() override {
    PoolStats s = pool().stats();
    auto convert = [](const Stat& from) {
      c10::CachingAllocator::Stat to;
      to.current = from.current;
      to.peak = from.peak;
      to.allocated = from.allocated;
      to.freed = from.freed;
      return to;
    };
    at::HostStats out;
    out.active_requests = convert(s.active[kAll]);
    out.active_bytes = convert(s.active_bytes[kAll]);
    out.allocations = convert(s.segment[kAll]);
    out.allocated_bytes = convert(s.reserved_bytes[kAll]);
    out.num_host_alloc = s.num_device_alloc;
    out.num_host_free = s.num_device_free;
    return out;
  }
  void reset_accumulated_stats() override { pool().reset_accumulated_stats(); }
  void reset_peak_stats() override { pool().reset_peak_stats(); }
};

PinnedAllocator* g_pinned = nullptr;

}  // namespace

c10::Allocator* pinned_allocator() { return g_pinned; }

bool is_pinned_pointer(const void* data) { return data && g_used && owner_of(data) == &pool(); }

void register_pinned_allocator() {
  g_pinned = new PinnedAllocator;
  at::setHostAllocator(kNeuron, g_pinned);
}

}  // namespace neuron
