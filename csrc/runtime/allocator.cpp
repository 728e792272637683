#include "allocator.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <cstring>

namespace neuron {

namespace {

thread_local c10::DeviceIndex t_host_scope = -1;
thread_local uint64_t t_capture_owner = 0;
thread_local AllocationTrace* t_recording = nullptr;
thread_local const AllocationTrace* t_replay = nullptr;
thread_local size_t t_replay_next = 0;

std::string human(size_t bytes) {
  char text[32];
  if (bytes >= size_t{1} << 30)
    snprintf(text, sizeof text, "%.2f GiB", bytes / 1073741824.0);
  else if (bytes >= size_t{1} << 20)
    snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
  else
    snprintf(text, sizeof text, "%zu bytes", bytes);
  return text;
}

void report_memory(void* ptr, int64_t bytes, MemoryPool& pool, c10::DeviceIndex index) {
  PoolStats stats = pool.stats();
  c10::reportMemoryUsageToProfiler(ptr, bytes, stats.allocated_bytes[kAll].current, stats.reserved_bytes[kAll].current,
                                   c10::Device(kNeuron, index));
}

c10::DeviceIndex index_of(const MemoryPool* pool) {
  for (int i = 0; i < device_count(); i++)
    if (&device_state(i).pool == pool) return i;
  return 0;
}

// After a fork the pages are the parent's: the child frees nothing.
void free_block(void* context) {
  if (in_bad_fork()) return;
  auto* block = static_cast<Block*>(context);
  MemoryPool* pool = block->segment->pool;
  char* ptr = block->ptr;
  int64_t bytes = block->size;
  pool->free(block);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) report_memory(ptr, -bytes, *pool, index_of(pool));
}

// For host allocations, whose context must be the address (c10's raw_allocate wants that).
void free_address(void* address) { free_block(MemoryPool::find(address)); }

[[noreturn]] void out_of_memory(c10::DeviceIndex index, const PoolExhausted& e) {
  c10::reportOutOfMemoryToProfiler(e.requested, e.allocated, e.reserved, c10::Device(kNeuron, index));
  size_t free_bytes = e.capacity > e.reserved ? e.capacity - e.reserved : 0;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "neuron:", static_cast<int>(index), " is out of memory: tried to allocate ",
                   human(e.requested), " of a capacity of ", human(e.capacity), "; ", human(e.allocated),
                   " are held by tensors, ", human(e.reserved - e.allocated), " are cached by the allocator and ",
                   human(free_bytes),
                   " are free. Use a smaller batch or model, free tensors, or raise TORCH_NEURON_MEMORY_BYTES if this "
                   "machine has more.");
}

Block* take(c10::DeviceIndex index, size_t bytes) {
  MemoryPool& pool = device_state(index).pool;
  const uint64_t owner = allocation_owner(index);
  Block* block = pool.try_allocate(bytes, owner);
  if (C10_UNLIKELY(!block)) {
    if (!StreamQueue::in_task()) settle_devices();  // queued work may hold memory that nobody else needs
    try {
      block = pool.allocate(bytes, owner);
    } catch (const PoolExhausted& e) {
      out_of_memory(index, e);
    }
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) report_memory(block->ptr, block->size, pool, index);
  return block;
}

c10::CachingAllocator::StatArray convert(const StatArray& from) {
  c10::CachingAllocator::StatArray to;
  for (size_t i = 0; i < from.size(); i++) {
    to[i].current = from[i].current;
    to[i].peak = from[i].peak;
    to[i].allocated = from[i].allocated;
    to[i].freed = from[i].freed;
  }
  return to;
}

struct NeuronAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DeviceIndex index = current_device();
    return allocate_on(index, bytes, c10::Device(kNeuron, index));
  }
  // The context is the block, not the address, so raw_allocate is not offered.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { std::memcpy(dst, src, bytes); }
  bool initialized() override { return neuron::initialized(); }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < device_count(); i++) {
      synchronize_device(i);
      device_state(i).pool.empty_cache();
    }
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    Block* block = block_of(ptr);
    if (!block) return;
    auto owner = static_cast<uint64_t>(stream.id());
    if (stream.device_index() == ptr.device().index() && block->owner == owner) return;
    device_state(ptr.device().index()).pool.record_use(block, &queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    PoolStats s = device_state(resolve_device(index)).pool.stats();
    c10::CachingDeviceAllocator::DeviceStats out;
    out.allocation = convert(s.allocation);
    out.segment = convert(s.segment);
    out.active = convert(s.active);
    out.inactive_split = convert(s.inactive_split);
    out.allocated_bytes = convert(s.allocated_bytes);
    out.reserved_bytes = convert(s.reserved_bytes);
    out.active_bytes = convert(s.active_bytes);
    out.inactive_split_bytes = convert(s.inactive_split_bytes);
    out.requested_bytes = convert(s.requested_bytes);
    out.num_alloc_retries = s.num_alloc_retries;
    out.num_ooms = s.num_ooms;
    out.num_device_alloc = s.num_device_alloc;
    out.num_device_free = s.num_device_free;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    device_state(resolve_device(index)).pool.reset_accumulated_stats();
  }
  void resetPeakStats(c10::DeviceIndex index) override { device_state(resolve_device(index)).pool.reset_peak_stats(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    MemoryPool& pool = device_state(resolve_device(index)).pool;
    size_t used = pool.stats().allocated_bytes[kAll].current;
    return {pool.capacity() - std::min(used, pool.capacity()), pool.capacity()};
  }
};

struct HostAllocator final : c10::Allocator {
  explicit HostAllocator(c10::Allocator* b) : base(b) { g_base_raw_deleter = b->raw_deleter(); }
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(t_host_scope < 0) || bytes == 0) return base->allocate(bytes);
    if (C10_UNLIKELY(t_replay && t_replay_next < t_replay->entries.size())) {
      auto& entry = t_replay->entries[t_replay_next++];
      if (entry.bytes == bytes) return {entry.address, c10::Device(c10::kCPU)};  // the graph's pool owns it
    }
    char* address = take(t_host_scope, bytes)->ptr;
    if (C10_UNLIKELY(t_recording != nullptr)) t_recording->entries.push_back({address, bytes});
    return {address, address, &free_address, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &raw_free; }
  // Memory that was taken by raw_allocate may be freed outside of the scope, or the other way round.
  static void raw_free(void* address) {
    if (MemoryPool::find(address))
      free_address(address);
    else
      g_base_raw_deleter(address);
  }
  static inline c10::DeleterFnPtr g_base_raw_deleter = nullptr;
  void copy_data(void* dst, const void* src, size_t bytes) const override { base->copy_data(dst, src, bytes); }
  c10::Allocator* base;
};

NeuronAllocator* g_allocator = nullptr;

}  // namespace

c10::DeviceAllocator* device_allocator() { return g_allocator; }

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes, c10::Device as) {
  if (bytes == 0) {
    device_state(index);  // says so if the device cannot be used
    return {nullptr, as};
  }
  Block* block = take(index, bytes);
  return {block->ptr, block, &free_block, as};
}

Block* block_of(const c10::DataPtr& ptr) {
  if (ptr.get_deleter() == &free_block) return static_cast<Block*>(ptr.get_context());
  return ptr.get_deleter() == &free_address ? MemoryPool::find(ptr.get_context()) : nullptr;
}

HostAllocationScope::HostAllocationScope(c10::DeviceIndex index) : previous_(std::exchange(t_host_scope, index)) {}
HostAllocationScope::~HostAllocationScope() { t_host_scope = previous_; }

AllocationRecording::AllocationRecording(AllocationTrace& trace) { t_recording = &trace; }
AllocationRecording::~AllocationRecording() { t_recording = nullptr; }
AllocationReplay::AllocationReplay(const AllocationTrace& trace) {
  t_replay = &trace;
  t_replay_next = 0;
}
AllocationReplay::~AllocationReplay() { t_replay = nullptr; }

uint64_t allocation_owner(c10::DeviceIndex index) {
  if (C10_UNLIKELY(t_capture_owner)) return t_capture_owner;
  return static_cast<uint64_t>(current_stream(index).id());
}

void set_capture_owner(uint64_t owner) { t_capture_owner = owner; }

void register_allocators() {
  g_allocator = new NeuronAllocator;
  c10::SetAllocator(kNeuron, g_allocator);
  // Delegates to the allocator that was there, but for library operators on neuron tensors.
  c10::SetCPUAllocator(new HostAllocator(c10::GetCPUAllocator()));
}

}  // namespace neuron
