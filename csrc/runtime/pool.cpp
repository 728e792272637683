#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <new>
#include <utility>

#include "stream_queue.h"

namespace neuron {

namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void add(StatArray& stat, StatKind kind, int64_t n) {
  stat[kAll].increase(n);
  stat[kind].increase(n);
}

void sub(StatArray& stat, StatKind kind, int64_t n) {
  stat[kAll].decrease(n);
  stat[kind].decrease(n);
}

// Which segment holds an address: two levels of tables over granules of 64 KiB and 47 bits of address, read without a
// lock.
class Directory {
 public:
  static std::atomic<Segment*>* slot(uintptr_t address) {
    static auto* top = new std::array<std::atomic<Leaf*>, kTop>{};
    static std::atomic<Segment*> nothing{nullptr};
    uintptr_t granule = address / kGranuleBytes;
    if (granule / kLeaf >= kTop) return &nothing;
    auto& leaf = (*top)[granule / kLeaf];
    Leaf* found = leaf.load(std::memory_order_acquire);
    if (!found) {
      auto* fresh = new Leaf{};
      if (leaf.compare_exchange_strong(found, fresh))
        found = fresh;
      else
        delete fresh;
    }
    return &(*found)[granule % kLeaf];
  }
  static void set(const Segment& segment, Segment* value) {
    for (size_t at = 0; at < segment.size; at += kGranuleBytes)
      slot(reinterpret_cast<uintptr_t>(segment.ptr) + at)->store(value, std::memory_order_release);
  }

 private:
  static constexpr size_t kGranuleBytes = 64 << 10, kLeaf = 1 << 12, kTop = 1 << 19;
  using Leaf = std::array<std::atomic<Segment*>, kLeaf>;
};

// Fresh zero pages on a border of `align` bytes, or null if the system has none: map more and cut off both ends.
char* map_pages(size_t size, size_t align, bool huge) {
  void* raw = mmap(nullptr, size + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uintptr_t>(raw);
  uintptr_t start = round_up(begin, align);
  if (start > begin) munmap(raw, start - begin);
  if (uintptr_t tail = begin + size + align - (start + size)) munmap(reinterpret_cast<void*>(start + size), tail);
  if (huge) madvise(reinterpret_cast<void*>(start), size, MADV_HUGEPAGE);  // a hint: failure changes speed alone
  return reinterpret_cast<char*>(start);
}

}  // namespace

MemoryPool::~MemoryPool() {
  for (auto& segment : segments_) {
    if (segment.large)
      for (Block* b = segment.first; b;) delete std::exchange(b, b->next);
    Directory::set(segment, nullptr);
    munmap(segment.ptr, segment.size);
  }
}

// Size classes: multiples of 64 bytes up to 512, then four classes to each doubling.
size_t MemoryPool::bin_of(size_t bytes, size_t* size) {
  if (bytes <= 512) {
    size_t n = (bytes + kAlign - 1) / kAlign;
    *size = n * kAlign;
    return n - 1;
  }
  size_t log = std::bit_width(bytes - 1) - 1;  // 2^log <= bytes-1 < 2^(log+1), log >= 9
  size_t step = size_t{1} << (log - 2);
  *size = round_up(bytes, step);
  return 8 + (log - 9) * 4 + (*size - (size_t{1} << log)) / step - 1;
}

void MemoryPool::trace(const char* action, size_t address, size_t size, uint64_t owner, AllocationContext context) {
  if (!history_limit_) return;
  if (history_.size() == history_limit_) history_.pop_front();
  auto now = std::chrono::system_clock::now().time_since_epoch();
  history_.push_back({action, address, size, owner, std::chrono::duration_cast<std::chrono::microseconds>(now).count(),
                      std::move(context)});
}

AllocationContext MemoryPool::gather_context() const {
  auto* recorder = recorder_.load(std::memory_order_relaxed);
  return recorder ? recorder() : nullptr;
}

Segment* MemoryPool::map_segment(size_t wanted, size_t least, bool large, uint64_t owner) {
  size_t size;
  auto map = [&]() -> char* {
    const size_t reserved = stats_.reserved_bytes[kAll].current, room = capacity_ - std::min(capacity_, reserved);
    for (size_t n : {wanted, least}) {
      size = n;
      if (char* ptr = n <= room ? map_pages(n, large ? kHuge : kGranule, large) : nullptr) return ptr;
    }
    return nullptr;
  };
  char* ptr = map();
  if (!ptr) {
    stats_.num_alloc_retries++;
    release_segments();
    ptr = map();
  }
  if (!ptr) return nullptr;
  Segment& segment = segments_.emplace_back();
  segment.pool = this;
  segment.ptr = ptr;
  segment.size = size;
  segment.large = large;
  segment.owner = owner;
  if (large) segment.starts.resize(size / kGranule);
  Directory::set(segment, &segment);
  stats_.num_device_alloc++;
  add(stats_.segment, large ? kLarge : kSmall, 1);
  add(stats_.reserved_bytes, large ? kLarge : kSmall, size);
  trace("segment_alloc", reinterpret_cast<size_t>(ptr), size, owner);
  return &segment;
}

void MemoryPool::unmap_segment(std::list<Segment>::iterator it) {
  StatKind kind = it->large ? kLarge : kSmall;
  stats_.num_device_free++;
  sub(stats_.segment, kind, 1);
  sub(stats_.reserved_bytes, kind, it->size);
  trace("segment_free", reinterpret_cast<size_t>(it->ptr), it->size, it->owner);
  Directory::set(*it, nullptr);
  munmap(it->ptr, it->size);
  segments_.erase(it);
}

Block* MemoryPool::take_small(size_t bytes, uint64_t owner) {
  size_t size;
  size_t bin = bin_of(bytes, &size);
  auto& bins = small_[owner];  // value-initialised to null lists
  if (!bins[bin]) {
    Segment* segment =
        map_segment(std::min(round_up(16 * size, kGranule), kMaxSlab), round_up(size, kGranule), false, owner);
    if (!segment) return nullptr;
    for (size_t at = 0; at + size <= segment->size; at += size) {
      Block& b = segment->slab.emplace_back();
      b.ptr = segment->ptr + at;
      b.size = size;
      b.segment = segment;
      b.owner = owner;
    }
    for (auto it = segment->slab.rbegin(); it != segment->slab.rend(); ++it) it->next = std::exchange(bins[bin], &*it);
  }
  Block* block = bins[bin];
  bins[bin] = block->next;
  block->next = nullptr;
  return block;
}

Block* MemoryPool::take_large(size_t bytes, uint64_t owner) {
  size_t size = round_up(bytes, kGranule);
  Block key;
  key.owner = owner;
  key.size = size;
  auto it = large_.lower_bound(&key);
  Block* block = nullptr;
  if (it != large_.end() && (*it)->owner == owner) {
    block = *it;
    large_.erase(it);
    if (block->prev || block->next) {
      sub(stats_.inactive_split, kLarge, 1);
      sub(stats_.inactive_split_bytes, kLarge, block->size);
    }
  } else {
    Segment* segment = map_segment(std::max(round_up(size, kHuge), kLargeSegment), size, true, owner);
    if (!segment) return nullptr;
    block = new Block;
    block->ptr = segment->ptr;
    block->size = segment->size;
    block->segment = segment;
    block->owner = owner;
    segment->first = block;
    set_start(block);
  }
  if (block->size - size >= kSmallLimit) {
    auto* rest = new Block;
    rest->ptr = block->ptr + size;
    rest->size = block->size - size;
    rest->segment = block->segment;
    rest->owner = owner;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = size;
    set_start(rest);
    large_.insert(rest);
    add(stats_.inactive_split, kLarge, 1);
    add(stats_.inactive_split_bytes, kLarge, rest->size);
  }
  return block;
}

Block* MemoryPool::allocate(size_t bytes, uint64_t owner) {
  AllocationContext context = gather_context();
  std::lock_guard lock(mutex_);
  if (Block* block = take(bytes, owner, context)) return block;
  stats_.num_ooms++;
  auto now = [](const StatArray& s) { return static_cast<size_t>(s[kAll].current); };
  size_t free_bytes = capacity_ - std::min(capacity_, now(stats_.allocated_bytes));
  trace("oom", free_bytes, bytes, owner, std::move(context));
  throw PoolExhausted{bytes, capacity_, now(stats_.allocated_bytes), now(stats_.reserved_bytes)};
}

Block* MemoryPool::try_allocate(size_t bytes, uint64_t owner) {
  AllocationContext context = gather_context();
  std::lock_guard lock(mutex_);
  return take(bytes, owner, std::move(context));
}

Block* MemoryPool::take(size_t bytes, uint64_t owner, AllocationContext context) {
  if (bytes > capacity_) return nullptr;
  if (!waiting_.empty()) reclaim();
  bool large = bytes >= kSmallLimit;
  Block* block = large ? take_large(bytes, owner) : take_small(bytes, owner);
  if (!block) return nullptr;
  StatKind kind = large ? kLarge : kSmall;
  block->allocated = true;
  block->requested = bytes;
  block->segment->live++;
  add(stats_.allocation, kind, 1);
  add(stats_.allocated_bytes, kind, block->size);
  add(stats_.requested_bytes, kind, bytes);
  add(stats_.active, kind, 1);
  add(stats_.active_bytes, kind, block->size);
  block->context = std::move(context);
  trace("alloc", reinterpret_cast<size_t>(block->ptr), bytes, owner, block->context);
  return block;
}

void MemoryPool::free(Block* block) {
  std::lock_guard lock(mutex_);
  StatKind kind = block->segment->large ? kLarge : kSmall;
  block->allocated = false;
  sub(stats_.allocation, kind, 1);
  sub(stats_.allocated_bytes, kind, block->size);
  sub(stats_.requested_bytes, kind, block->requested);
  trace("free_requested", reinterpret_cast<size_t>(block->ptr), block->requested, block->owner, block->context);
  if (block->uses.empty()) return release(block);
  for (auto& [stream, ticket] : block->uses) ticket = stream->enqueued();
  block->freeing = true;
  waiting_.push_back(block);
}

void MemoryPool::record_use(Block* block, StreamQueue* stream) {
  std::lock_guard lock(mutex_);
  for (auto& use : block->uses)
    if (use.first == stream) return;
  block->uses.emplace_back(stream, 0);
}

void MemoryPool::reclaim() {
  std::erase_if(waiting_, [&](Block* block) {
    for (auto& [stream, ticket] : block->uses)
      if (!stream->done(ticket)) return false;
    block->uses.clear();
    block->freeing = false;
    release(block);
    return true;
  });
}

void MemoryPool::release(Block* block) {
  Segment* segment = block->segment;
  StatKind kind = segment->large ? kLarge : kSmall;
  segment->live--;
  sub(stats_.active, kind, 1);
  sub(stats_.active_bytes, kind, block->size);
  trace("free_completed", reinterpret_cast<size_t>(block->ptr), block->requested, block->owner,
        std::move(block->context));
  block->context = nullptr;
  block->requested = 0;
  if (!segment->large) {
    size_t size;
    Block*& head = small_[block->owner][bin_of(block->size, &size)];
    block->next = head;
    head = block;
    return;
  }
  auto absorb = [&](Block* a, Block* b) {  // b follows a; a survives
    a->size += b->size;
    a->next = b->next;
    if (a->next) a->next->prev = a;
    segment->starts[(b->ptr - segment->ptr) / kGranule] = nullptr;
    delete b;
  };
  auto take_back = [&](Block* b) {
    if (!b || b->allocated || b->freeing) return false;
    large_.erase(b);
    sub(stats_.inactive_split, kLarge, 1);
    sub(stats_.inactive_split_bytes, kLarge, b->size);
    return true;
  };
  if (take_back(block->next)) absorb(block, block->next);
  if (take_back(block->prev)) {
    block = block->prev;
    absorb(block, block->next);
  }
  large_.insert(block);
  if (block->prev || block->next) {
    add(stats_.inactive_split, kLarge, 1);
    add(stats_.inactive_split_bytes, kLarge, block->size);
  }
}

void MemoryPool::release_segments() {
  reclaim();
  for (auto& [owner, bins] : small_)
    for (Block*& head : bins)
      for (Block** link = &head; *link;) {
        if ((*link)->segment->live == 0)
          *link = (*link)->next;
        else
          link = &(*link)->next;
      }
  for (auto it = segments_.begin(); it != segments_.end();) {
    auto next = std::next(it);
    if (it->live == 0 && it->owner < kPrivateOwner) {
      if (it->large) {
        large_.erase(it->first);
        delete it->first;
      }
      unmap_segment(it);
    }
    it = next;
  }
}

Block* MemoryPool::find(const void* address) {
  Segment* segment = *Directory::slot(reinterpret_cast<uintptr_t>(address));
  if (!segment) return nullptr;
  const size_t offset = static_cast<const char*>(address) - segment->ptr;
  Block* block = nullptr;
  if (!segment->large) {
    const size_t index = offset / segment->slab.front().size;
    if (index < segment->slab.size()) block = &segment->slab[index];
  } else {
    // The last block that starts at or before the address. A living block's granules are its own, so nothing that other
    // threads change is read.
    for (size_t g = offset / kGranule + 1; !block && g-- > 0;) block = segment->starts[g];
  }
  return block && block->allocated ? block : nullptr;
}

void MemoryPool::set_start(Block* block) {
  block->segment->starts[(block->ptr - block->segment->ptr) / kGranule] = block;
}

void MemoryPool::empty_cache() {
  std::lock_guard lock(mutex_);
  release_segments();
}

void MemoryPool::retire_owner(uint64_t owner, uint64_t heir) {
  std::lock_guard lock(mutex_);
  std::vector<Block*> moved;
  for (auto it = large_.begin(); it != large_.end();) {
    if ((*it)->owner == owner) {
      moved.push_back(*it);
      it = large_.erase(it);
    } else {
      ++it;
    }
  }
  for (auto& segment : segments_) {
    if (segment.owner != owner) continue;
    segment.owner = heir;
    for (Block* b = segment.first; b; b = b->next) b->owner = heir;
    for (Block& b : segment.slab) b.owner = heir;
  }
  large_.insert(moved.begin(), moved.end());
  if (auto it = small_.find(owner); it != small_.end()) {
    auto bins = it->second;
    small_.erase(it);
    auto& heirs = small_[heir];
    for (size_t bin = 0; bin < kBins; bin++)
      for (Block* b = bins[bin]; b;) {
        Block* next = b->next;
        b->next = std::exchange(heirs[bin], b);
        b = next;
      }
  }
}

size_t MemoryPool::capacity() const {
  std::lock_guard lock(mutex_);
  return capacity_;
}

void MemoryPool::set_capacity(size_t bytes) {
  std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

PoolStats MemoryPool::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

namespace {
template <class F>
void for_each_stat(PoolStats& s, F f) {
  for (auto* array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                      &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
    for (auto& stat : *array) f(stat);
}
}  // namespace

void MemoryPool::reset_peak_stats() {
  std::lock_guard lock(mutex_);
  for_each_stat(stats_, [](Stat& s) { s.peak = s.current; });
}

void MemoryPool::reset_accumulated_stats() {
  std::lock_guard lock(mutex_);
  for_each_stat(stats_, [](Stat& s) { s.allocated = s.freed = 0; });
  stats_.num_alloc_retries = stats_.num_ooms = 0;
}

std::vector<SegmentView> MemoryPool::snapshot() const {
  std::lock_guard lock(mutex_);
  std::vector<SegmentView> out;
  for (auto& segment : segments_) {
    SegmentView view{reinterpret_cast<size_t>(segment.ptr), segment.size, 0, 0, 0, segment.owner, segment.large, {}};
    auto put = [&](const Block& b) {
      const char* state = b.allocated ? "active_allocated" : b.freeing ? "active_awaiting_free" : "inactive";
      view.allocated += b.allocated ? b.size : 0;
      view.active += b.allocated || b.freeing ? b.size : 0;
      view.requested += b.requested;
      view.blocks.push_back({reinterpret_cast<size_t>(b.ptr), b.size, b.requested, state, b.context});
    };
    if (segment.large)
      for (Block* b = segment.first; b; b = b->next) put(*b);
    else
      for (auto& b : segment.slab) put(b);
    out.push_back(std::move(view));
  }
  return out;
}

void MemoryPool::record_history(size_t max_entries, AllocationContext (*recorder)()) {
  std::lock_guard lock(mutex_);
  history_limit_ = max_entries;
  recorder_ = max_entries ? recorder : nullptr;
  history_.clear();
}

std::vector<TraceEntry> MemoryPool::history() const {
  std::lock_guard lock(mutex_);
  return {history_.begin(), history_.end()};
}

}  // namespace neuron
