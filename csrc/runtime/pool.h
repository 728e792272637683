// Caching memory pool of one device. No torch here, so that it is tested alone and under sanitizers.
//
// Blocks belong to an owner: a stream, or the private pool of a captured graph. A freed block goes back to its owner
// and is reused at once, because work of one owner runs in order. A block that other streams used (`record_use`) is
// reused after they have passed the point at which it was freed.
//
// Two kinds of blocks:
//   small (< 1 MiB)  fixed size classes cut from slabs of 64 KiB and more; allocation and free are a list pop and push
//   large            best fit with split and merge in segments of at least 32 MiB
// Large segments come from anonymous memory on 2 MiB borders with huge pages: first touch of fresh pages costs about
// ten times a reuse, so what is freed is kept.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace neuron {

class StreamQueue;

// Owners from here on are private pools of captured graphs; their free memory is kept for their replays.
constexpr uint64_t kPrivateOwner = uint64_t{1} << 62;

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void increase(int64_t n) {
    current += n;
    allocated += n;
    if (current > peak) peak = current;
  }
  void decrease(int64_t n) {
    current -= n;
    freed += n;
  }
};

// Index of each statistic: all blocks, small blocks, large blocks (the order of c10's StatTypes).
enum StatKind : size_t { kAll = 0, kSmall = 1, kLarge = 2 };
using StatArray = std::array<Stat, 3>;

struct PoolStats {
  StatArray allocation, segment, active, inactive_split;                                           // counts
  StatArray allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;  // bytes
  int64_t num_alloc_retries = 0, num_ooms = 0, num_device_alloc = 0, num_device_free = 0;
};

class MemoryPool;
struct Segment;

// Who asked for memory, as the history's recorder tells it.
using AllocationContext = std::shared_ptr<void>;

struct Block {
  char* ptr = nullptr;
  size_t size = 0;       // bytes of the block
  size_t requested = 0;  // bytes asked for
  Segment* segment = nullptr;
  uint64_t owner = 0;
  bool allocated = false;
  bool freeing = false;                    // freed by the user, still used by another stream
  Block *prev = nullptr, *next = nullptr;  // neighbours in a large segment; `next` also links small free lists
  std::vector<std::pair<StreamQueue*, uint64_t>> uses;  // other streams and the ticket to wait for
  AllocationContext context;                            // while history is kept
};

struct Segment {
  MemoryPool* pool = nullptr;
  char* ptr = nullptr;
  size_t size = 0;
  bool large = false;
  uint64_t owner = 0;
  size_t live = 0;  // allocated or freeing blocks in it
  Block* first = nullptr;
  std::deque<Block> slab;  // the blocks of a small segment
  // The block of a large segment that starts in each granule; blocks are larger than granules.
  std::vector<Block*> starts;
};

struct SegmentView {  // for snapshots
  struct BlockView {
    size_t address, size, requested;
    const char* state;
    AllocationContext context;
  };
  size_t address, size, allocated, active, requested;
  uint64_t owner;
  bool large;
  std::vector<BlockView> blocks;
};

struct TraceEntry {
  const char* action;  // alloc, free_requested, free_completed, segment_alloc, segment_free, oom
  size_t address, size;
  uint64_t owner;
  int64_t time_us;
  AllocationContext context;  // of the allocation
};

// Thrown when the capacity is exhausted; the caller words the message.
struct PoolExhausted {
  size_t requested, capacity, allocated, reserved;
};

class MemoryPool {
 public:
  explicit MemoryPool(size_t capacity) : capacity_(capacity) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool();

  // Smallest block that holds `bytes`, 64-byte aligned. Throws PoolExhausted. `bytes` must not be 0.
  Block* allocate(size_t bytes, uint64_t owner);
  // The same, but null if the capacity is exhausted.
  Block* try_allocate(size_t bytes, uint64_t owner);
  void free(Block* block);
  // `stream` uses the block as well: reuse waits for what it holds when the block is freed.
  void record_use(Block* block, StreamQueue* stream);
  // The allocated block of any pool that holds `address`, or null. Takes no lock.
  static Block* find(const void* address);
  // Gives wholly free segments back to the operating system.
  void empty_cache();
  // Hands a private pool's memory over to `heir` (a captured graph was reset).
  void retire_owner(uint64_t owner, uint64_t heir);

  size_t capacity() const;
  void set_capacity(size_t bytes);
  PoolStats stats() const;
  void reset_peak_stats();
  void reset_accumulated_stats();
  std::vector<SegmentView> snapshot() const;
  // Keeps the last `max_entries` allocator events; 0 turns tracing off. `recorder` is called for each allocation, with
  // no lock held; null for none.
  void record_history(size_t max_entries, AllocationContext (*recorder)() = nullptr);
  std::vector<TraceEntry> history() const;

 private:
  static constexpr size_t kAlign = 64, kSmallLimit = 1 << 20, kMaxSlab = 2 << 20, kLargeSegment = 32 << 20,
                          kHuge = 2 << 20, kGranule = 64 << 10;  // segments and large blocks are whole granules
  static constexpr size_t kBins = 64;

  static size_t bin_of(size_t bytes, size_t* size);
  struct BySize {
    using is_transparent = void;
    bool operator()(const Block* a, const Block* b) const {
      if (a->owner != b->owner) return a->owner < b->owner;
      return a->size != b->size ? a->size < b->size : a->ptr < b->ptr;
    }
  };

  Block* take(size_t bytes, uint64_t owner, AllocationContext context);  // null if the capacity is exhausted; lock held
  Block* take_small(size_t bytes, uint64_t owner);
  Block* take_large(size_t bytes, uint64_t owner);
  // A segment of `wanted` bytes, or of `least` if there is no room for more.
  Segment* map_segment(size_t wanted, size_t least, bool large, uint64_t owner);
  static void set_start(Block* block);
  void unmap_segment(std::list<Segment>::iterator it);
  void release(Block* block);  // back to the free lists; lock held
  void reclaim();              // finishes frees that waited for other streams; lock held
  void release_segments();     // lock held
  void trace(const char* action, size_t address, size_t size, uint64_t owner, AllocationContext context = {});
  AllocationContext gather_context() const;  // no lock held

  mutable std::mutex mutex_;
  size_t capacity_;
  std::list<Segment> segments_;
  std::unordered_map<uint64_t, std::array<Block*, kBins>> small_;
  std::set<Block*, BySize> large_;
  std::vector<Block*> waiting_;
  PoolStats stats_;
  size_t history_limit_ = 0;
  std::atomic<AllocationContext (*)()> recorder_{nullptr};
  std::deque<TraceEntry> history_;
};

}  // namespace neuron
