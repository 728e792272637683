// MemoryPool against a model that knows only what the interface promises.
#include "runtime/pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "runtime/stream_queue.h"

namespace {

using neuron::Block;
using neuron::kAll;
using neuron::kLarge;
using neuron::kSmall;
using neuron::MemoryPool;
using neuron::PoolExhausted;
using neuron::PoolStats;
using neuron::Stat;
using neuron::StreamQueue;

constexpr size_t kKiB = size_t{1} << 10, kMiB = size_t{1} << 20, kGiB = size_t{1} << 30;

size_t address_of(const Block* b) { return reinterpret_cast<size_t>(b->ptr); }

// A stream whose work is done when the test says so.
class Gate {
 public:
  StreamQueue& queue() { return queue_; }
  void add_work() { queue_.enqueue(std::make_unique<Nothing>()); }
  void pass() { queue_.drain(); }

 private:
  struct Nothing final : neuron::Task {
    void run() override {}
  };
  StreamQueue queue_;
};

// What snapshot() and stats() must agree on at all times.
void check_snapshot(const MemoryPool& pool) {
  const PoolStats stats = pool.stats();
  int64_t segments[3] = {}, reserved[3] = {}, allocated[3] = {}, blocks[3] = {}, active[3] = {}, active_blocks[3] = {},
          requested[3] = {}, split[3] = {}, split_bytes[3] = {};
  size_t end = 0;
  auto views = pool.snapshot();
  std::sort(views.begin(), views.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (auto& segment : views) {
    const int kind = segment.large ? kLarge : kSmall;
    CHECK(segment.address >= end);  // no two overlap
    end = segment.address + segment.size;
    segments[kind]++;
    reserved[kind] += segment.size;
    CHECK(!segment.blocks.empty());
    size_t at = segment.address, own_allocated = 0, own_active = 0, own_requested = 0;
    bool free_before = false;
    for (auto& block : segment.blocks) {
      const std::string state = block.state;
      CHECK_EQ(block.address, at);
      CHECK(block.size > 0 && block.address % 64 == 0);
      at += block.size;
      const bool is_allocated = state == "active_allocated", is_free = state == "inactive";
      CHECK(is_allocated || is_free || state == "active_awaiting_free");
      if (is_free)
        CHECK_EQ(block.requested, 0u);
      else
        CHECK(block.requested > 0 && block.requested <= block.size);
      if (segment.large) {
        CHECK(!(is_free && free_before));  // neighbours that are free are one block
        free_before = is_free;
        if (is_free && segment.blocks.size() > 1) split[kind]++, split_bytes[kind] += block.size;
      } else {
        CHECK_EQ(block.size, segment.blocks[0].size);
      }
      if (is_allocated) blocks[kind]++, own_allocated += block.size, requested[kind] += block.requested;
      if (!is_free) active_blocks[kind]++, own_active += block.size;
      own_requested += block.requested;
    }
    if (segment.large)
      CHECK_EQ(at, end);
    else
      CHECK(at <= end && end - at < segment.blocks[0].size);
    CHECK_EQ(segment.allocated, own_allocated);
    CHECK_EQ(segment.active, own_active);
    CHECK_EQ(segment.requested, own_requested);
    allocated[kind] += own_allocated;
    active[kind] += own_active;
  }
  auto same = [](const neuron::StatArray& stat, const int64_t (&expected)[3]) {
    CHECK_EQ(stat[kSmall].current, expected[kSmall]);
    CHECK_EQ(stat[kLarge].current, expected[kLarge]);
    CHECK_EQ(stat[kAll].current, expected[kSmall] + expected[kLarge]);
    for (auto& s : stat) {
      CHECK_EQ(s.allocated - s.freed, s.current);
      CHECK(s.peak >= s.current);
    }
  };
  same(stats.segment, segments);
  same(stats.reserved_bytes, reserved);
  same(stats.allocation, blocks);
  same(stats.allocated_bytes, allocated);
  same(stats.active, active_blocks);
  same(stats.active_bytes, active);
  same(stats.requested_bytes, requested);
  same(stats.inactive_split, split);
  same(stats.inactive_split_bytes, split_bytes);
  CHECK_EQ(stats.num_device_alloc - stats.num_device_free, stats.segment[kAll].current);
}

TEST(every_size_gets_an_aligned_block_that_holds_it) {
  MemoryPool pool(kGiB);
  size_t before = 0;
  auto try_size = [&](size_t bytes) {
    Block* b = pool.allocate(bytes, 0);
    CHECK(b->size >= bytes && address_of(b) % 64 == 0);
    CHECK_EQ(b->requested, bytes);
    // Waste: less than 64 bytes up to 512, then at most a quarter, and of large blocks what is too small to split off.
    if (bytes <= 512)
      CHECK(b->size - bytes < 64);
    else if (bytes < kMiB)
      CHECK(b->size <= bytes + bytes / 4 + 1);
    else
      CHECK(b->size - bytes < kMiB + 64 * kKiB);
    if (bytes < kMiB) {
      CHECK(b->size >= before);  // classes grow with the request
      before = b->size;
    }
    pool.free(b);
  };
  for (size_t bytes = 1; bytes < 16 * kKiB; bytes++) try_size(bytes);
  for (size_t bytes = 16 * kKiB; bytes <= 3 * kMiB; bytes += 251) try_size(bytes);
  for (size_t power = kMiB / 2; power <= 256 * kMiB; power *= 2)
    for (int d = -65; d <= 65; d++) try_size(power + d < kMiB ? std::max(before, power + d) : power + d);
  check_snapshot(pool);
}

TEST(a_freed_block_is_reused_by_its_owner_at_once) {
  MemoryPool pool(kGiB);
  for (size_t bytes : {size_t{1}, size_t{700}, kMiB - 1, kMiB, 5 * kMiB, 100 * kMiB}) {
    Block* b = pool.allocate(bytes, 1);
    char* ptr = b->ptr;
    pool.free(b);
    b = pool.allocate(bytes, 1);
    CHECK(b->ptr == ptr);
    pool.free(b);
    Block* other = pool.allocate(bytes, 2);
    CHECK(other->ptr != ptr);
    pool.free(other);
  }
  check_snapshot(pool);
}

TEST(fresh_large_memory_is_zero_and_writable_to_the_last_byte) {
  MemoryPool pool(kGiB);
  for (size_t bytes : {kMiB + 4097, 3 * kMiB + 1, 40 * kMiB}) {
    Block* b = pool.allocate(bytes, 0);
    for (size_t at = 0; at < b->size; at += 4096) CHECK_EQ(b->ptr[at], 0);
    b->ptr[0] = b->ptr[b->size - 1] = 1;
    pool.free(b);
    pool.empty_cache();
  }
}

TEST(split_parts_join_again) {
  MemoryPool pool(kGiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; i++) blocks.push_back(pool.allocate(4 * kMiB, 0));  // one segment
  CHECK_EQ(pool.stats().segment[kAll].current, 1);
  for (int i : {1, 3, 0, 6, 2, 7, 5, 4}) {
    pool.free(blocks[i]);
    check_snapshot(pool);
  }
  Block* whole = pool.allocate(32 * kMiB, 0);
  CHECK_EQ(pool.stats().num_device_alloc, 1);
  CHECK(whole->ptr == blocks[0]->ptr || whole->size == 32 * kMiB);
  pool.free(whole);
}

TEST(the_best_fit_is_taken) {
  MemoryPool pool(kGiB);
  std::vector<Block*> keep, holes;
  for (size_t mib : {9, 3, 5}) {
    holes.push_back(pool.allocate(mib * kMiB, 0));
    keep.push_back(pool.allocate(2 * kMiB, 0));
  }
  char* three = holes[1]->ptr;
  for (Block* b : holes) pool.free(b);
  CHECK(pool.allocate(3 * kMiB, 0)->ptr == three);
  check_snapshot(pool);
}

TEST(find_knows_allocated_blocks_alone) {
  MemoryPool pool(kGiB), other(kGiB);
  int on_stack = 0;
  CHECK(!MemoryPool::find(nullptr) && !MemoryPool::find(&on_stack) && !MemoryPool::find(&pool));
  CHECK(!MemoryPool::find(reinterpret_cast<void*>(~uintptr_t{0})));
  std::vector<Block*> blocks;
  for (size_t bytes : {size_t{1}, size_t{64}, 5 * kKiB, kMiB - 1, kMiB, kMiB + 4096, 7 * kMiB, 50 * kMiB})
    for (int i = 0; i < 5; i++) blocks.push_back((i % 2 ? pool : other).allocate(bytes, i));
  auto known = [](const Block* b, bool yes) {
    for (size_t at : {size_t{0}, b->size / 3, b->size / 2, b->size - 1}) {
      const Block* found = MemoryPool::find(b->ptr + at);
      CHECK(found == (yes ? b : nullptr));
    }
  };
  for (Block* b : blocks) known(b, true);
  for (size_t i = 0; i < blocks.size(); i += 2) {
    char* ptr = blocks[i]->ptr;
    blocks[i]->segment->pool->free(blocks[i]);
    CHECK(!MemoryPool::find(ptr));
  }
  for (size_t i = 1; i < blocks.size(); i += 2) known(blocks[i], true);
  char* unmapped = pool.allocate(60 * kMiB, 9)->ptr;
  pool.free(MemoryPool::find(unmapped));
  pool.empty_cache();
  CHECK(!MemoryPool::find(unmapped));
}

TEST(memory_used_by_other_streams_waits_for_them) {
  for (size_t bytes : {size_t{100}, 4 * kMiB}) {
    MemoryPool pool(kGiB);
    Gate a, b;
    Block* block = pool.allocate(bytes, 0);
    char* ptr = block->ptr;
    a.add_work();
    pool.record_use(block, &a.queue());
    pool.record_use(block, &a.queue());
    pool.record_use(block, &b.queue());
    b.add_work();  // before the block is freed: counts
    pool.free(block);
    a.add_work();  // after: does not
    const int kind = bytes < kMiB ? kSmall : kLarge;
    CHECK_EQ(pool.stats().allocated_bytes[kind].current, 0);
    CHECK_EQ(pool.stats().active[kind].current, 1);
    CHECK(!MemoryPool::find(ptr));
    auto reused = [&] {
      Block* again = pool.allocate(bytes, 0);
      bool same = again->ptr == ptr;
      pool.free(again);
      return same;
    };
    CHECK(!reused());
    check_snapshot(pool);
    a.queue().wait(1);
    CHECK(!reused());
    pool.empty_cache();
    CHECK_EQ(pool.stats().segment[kAll].current, 1);
    b.pass();
    CHECK(!a.queue().idle());
    std::vector<char*> seen;
    for (int i = 0; i < 3; i++) seen.push_back(pool.allocate(bytes, 0)->ptr);
    CHECK(std::find(seen.begin(), seen.end(), ptr) != seen.end());
    CHECK_EQ(pool.stats().active[kind].current, 3);
    check_snapshot(pool);
  }
}

TEST(an_exhausted_pool_says_so_and_works_on) {
  MemoryPool pool(100 * kMiB);
  Block* big = pool.allocate(60 * kMiB, 0);
  Block* small = pool.allocate(1000, 0);
  for (size_t bytes : {60 * kMiB, 101 * kMiB, size_t{1} << 62, ~size_t{0}, ~size_t{0} - kMiB}) {
    try {
      pool.allocate(bytes, 0);
      check::fail(__FILE__, __LINE__, bytes, " bytes were allocated");
    } catch (const PoolExhausted& e) {
      CHECK_EQ(e.requested, bytes);
      CHECK_EQ(e.capacity, 100 * kMiB);
      CHECK_EQ(e.allocated, big->size + small->size);
      CHECK(e.reserved >= e.allocated && e.reserved <= e.capacity);
    }
    CHECK(pool.try_allocate(bytes, 0) == nullptr);
    check_snapshot(pool);
  }
  CHECK_EQ(pool.stats().num_ooms, 5);
  Block* fits = pool.allocate(30 * kMiB, 0);
  pool.free(fits);
  pool.free(big);
  pool.free(pool.allocate(90 * kMiB, 1));  // gives owner 0's cached memory back to the system
  CHECK(pool.stats().num_alloc_retries > 0);
  pool.free(small);
  check_snapshot(pool);
}

TEST(the_whole_capacity_can_be_used) {
  for (size_t capacity : {64 * kKiB, kMiB, kMiB + 64 * kKiB, 5 * kMiB, 33 * kMiB, 100 * kMiB + 64 * kKiB}) {
    MemoryPool pool(capacity);
    pool.free(pool.allocate(capacity, 0));
    pool.free(pool.allocate(capacity / 2 + 1, 1));
    std::vector<Block*> blocks;
    while (Block* b = pool.try_allocate(64 * kKiB, 2)) blocks.push_back(b);
    CHECK(blocks.size() * 64 * kKiB > capacity - 2 * kMiB || blocks.size() * 64 * kKiB == capacity);
    CHECK(!blocks.empty());
    for (Block* b : blocks) pool.free(b);
    check_snapshot(pool);
  }
}

TEST(a_cache_that_leaves_room_enough_is_kept) {
  MemoryPool pool(40 * kMiB);
  Block* cached = pool.allocate(20 * kMiB, 0);
  pool.free(cached);
  pool.allocate(3 * kMiB, 1);  // a full segment would not fit beside the cache, this does
  CHECK_EQ(pool.stats().num_device_free, 0);
  try {
    pool.allocate(50 * kMiB, 1);  // never fits: no reason to drop the cache
  } catch (const PoolExhausted&) {
  }
  CHECK_EQ(pool.stats().num_device_free, 0);
}

TEST(empty_cache_returns_all_that_is_free) {
  MemoryPool pool(kGiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 3000; i++) blocks.push_back(pool.allocate(1 + i * 37 % (3 * kMiB / 2), i % 3));
  Block* kept = pool.allocate(2 * kMiB, 7);
  for (Block* b : blocks) pool.free(b);
  pool.empty_cache();
  CHECK_EQ(pool.stats().segment[kAll].current, 1);
  check_snapshot(pool);
  pool.free(kept);
  pool.empty_cache();
  CHECK_EQ(pool.stats().reserved_bytes[kAll].current, 0);
  CHECK(pool.snapshot().empty());
  pool.free(pool.allocate(10, 0));
}

TEST(an_heir_uses_what_its_predecessor_left) {
  MemoryPool pool(kGiB);
  Gate gate;
  Block* large = pool.allocate(4 * kMiB, 5);
  Block* small = pool.allocate(100, 5);
  Block* waiting = pool.allocate(4 * kMiB, 5);
  char *large_ptr = large->ptr, *small_ptr = small->ptr, *waiting_ptr = waiting->ptr;
  pool.free(small);
  pool.record_use(waiting, &gate.queue());
  gate.add_work();
  pool.free(waiting);
  pool.retire_owner(5, 1);
  pool.retire_owner(5, 1);
  pool.retire_owner(1, 1);
  CHECK_EQ(large->owner, 1u);
  pool.free(large);
  CHECK(pool.allocate(100, 1)->ptr == small_ptr);
  CHECK(pool.allocate(4 * kMiB, 1)->ptr == large_ptr);
  gate.pass();
  CHECK(pool.allocate(4 * kMiB, 1)->ptr == waiting_ptr);
  CHECK_EQ(pool.stats().segment[kAll].current, 2);
  check_snapshot(pool);
}

TEST(capacity_can_change) {
  MemoryPool pool(10 * kMiB);
  pool.set_capacity(200 * kMiB);
  CHECK_EQ(pool.capacity(), 200 * kMiB);
  Block* b = pool.allocate(100 * kMiB, 0);
  pool.set_capacity(kMiB);
  CHECK_THROWS(pool.allocate(kMiB, 0), PoolExhausted);
  pool.free(b);
  pool.free(pool.allocate(kMiB, 0));
  check_snapshot(pool);
}

TEST(peaks_and_totals_can_be_reset) {
  MemoryPool pool(kGiB);
  pool.free(pool.allocate(4 * kMiB, 0));
  Block* b = pool.allocate(kMiB, 0);
  CHECK_EQ(pool.stats().allocated_bytes[kAll].peak, int64_t(4 * kMiB));
  pool.reset_peak_stats();
  CHECK_EQ(pool.stats().allocated_bytes[kAll].peak, int64_t(b->size));
  pool.reset_accumulated_stats();
  CHECK_EQ(pool.stats().allocation[kAll].allocated, 0);
  CHECK_EQ(pool.stats().allocation[kAll].current, 1);
  pool.free(b);
  CHECK_EQ(pool.stats().allocation[kAll].freed, 1);
}

TEST(history_tells_what_happened) {
  MemoryPool pool(50 * kMiB);
  pool.free(pool.allocate(10, 0));
  CHECK(pool.history().empty());
  pool.record_history(100);
  Gate gate;
  Block* b = pool.allocate(2 * kMiB, 3);
  size_t address = address_of(b);
  pool.record_use(b, &gate.queue());
  gate.add_work();
  pool.free(b);
  gate.pass();
  pool.empty_cache();
  CHECK_THROWS(pool.allocate(51 * kMiB, 3), PoolExhausted);
  std::string actions;
  int64_t time = 0;
  for (auto& e : pool.history()) {
    actions += std::string(e.action) + " ";
    CHECK(e.time_us >= time);
    time = e.time_us;
    if (std::string(e.action) != "oom" && e.owner == 3) CHECK_EQ(e.address, address);
    if (e.owner == 3 && e.action[0] != 's') CHECK_EQ(e.size, std::string(e.action) == "oom" ? 51 * kMiB : 2 * kMiB);
  }
  // The small slab of the first line goes too.
  CHECK_EQ(actions, "segment_alloc alloc free_requested free_completed segment_free segment_free oom ");
  pool.record_history(3);
  for (int i = 0; i < 5; i++) pool.free(pool.allocate(10, 0));
  CHECK_EQ(pool.history().size(), 3u);
  pool.record_history(0);
  CHECK(pool.history().empty());
}

// Random programs on a small pool. The model holds what was asked for and where it is.
struct Model {
  struct Live {
    size_t bytes, size;
    uint64_t owner;
    uint64_t tag;
    std::vector<Gate*> users;
  };
  struct Waiting {
    size_t size;
    std::vector<std::pair<Gate*, uint64_t>> until;
    bool passed() const {
      for (auto& [gate, ticket] : until)
        if (!gate->queue().done(ticket)) return false;
      return true;
    }
  };
  std::map<size_t, std::pair<Block*, Live>> live;  // by address
  std::map<size_t, Waiting> waiting;
  int64_t requested = 0, allocated = 0, peak = 0, allocations = 0, ooms = 0;
};

template <class Map, class Size>
bool overlaps(const Map& map, size_t begin, size_t size, Size size_of) {
  auto after = map.lower_bound(begin);
  if (after != map.end() && after->first < begin + size) return true;
  return after != map.begin() && std::prev(after)->first + size_of(std::prev(after)->second) > begin;
}

void write_tag(Block* b, uint64_t tag) {
  for (size_t at : {size_t{0}, b->requested - 1}) b->ptr[at] = static_cast<char>(tag);
}
bool has_tag(Block* b, uint64_t tag) {
  return b->ptr[0] == static_cast<char>(tag) && b->ptr[b->requested - 1] == static_cast<char>(tag);
}

TEST(fuzz_against_a_model) {
  constexpr size_t kCapacity = 96 * kMiB;
  for (uint64_t seed : check::seeds(20)) {
    std::mt19937_64 random(seed);
    auto below = [&](uint64_t n) { return random() % n; };
    std::deque<Gate> gates(3);
    MemoryPool pool(kCapacity);
    Model model;
    std::vector<uint64_t> owners = {0, 1, 2, 1000};
    auto size = [&]() -> size_t {
      size_t bits = below(26);
      return 1 + (bits ? below(size_t{1} << bits) : 0);
    };
    auto free_one = [&] {
      auto it = std::next(model.live.begin(), below(model.live.size()));
      auto [block, live] = it->second;
      CHECK(has_tag(block, live.tag));
      CHECK(MemoryPool::find(block->ptr + live.size / 2) == block);
      CHECK_EQ(block->owner, live.owner);
      if (!live.users.empty()) {
        Model::Waiting waiting{live.size, {}};
        for (Gate* g : live.users) waiting.until.emplace_back(g, g->queue().enqueued());
        model.waiting[it->first] = waiting;
      }
      pool.free(block);
      model.requested -= live.bytes;
      model.allocated -= live.size;
      model.live.erase(it);
    };
    for (int step = 0; step < 1500; step++) {
      switch (below(12)) {
        case 0:
        case 1:
        case 2:
        case 3:
        case 4: {
          const size_t bytes = size();
          const uint64_t owner = owners[below(owners.size())];
          try {
            Block* b = pool.allocate(bytes, owner);
            const size_t at = address_of(b);
            CHECK(b->size >= bytes && at % 64 == 0);
            CHECK(b->owner == owner && b->segment->owner == owner);
            CHECK(!overlaps(model.live, at, b->size, [](auto& e) { return e.second.size; }));
            std::erase_if(model.waiting, [](auto& entry) { return entry.second.passed(); });
            CHECK(!overlaps(model.waiting, at, b->size, [](auto& w) { return w.size; }));
            model.live[at] = {b, {bytes, b->size, owner, random(), {}}};
            write_tag(b, model.live[at].second.tag);
            model.requested += bytes;
            model.allocated += b->size;
            model.allocations++;
            model.peak = std::max(model.peak, model.requested);
          } catch (const PoolExhausted& e) {
            model.ooms++;
            CHECK_EQ(e.requested, bytes);
            CHECK_EQ(e.allocated, size_t(model.allocated));
            CHECK(e.reserved <= kCapacity);
            for (int i = 0; i < 3 && !model.live.empty(); i++) free_one();
          }
          break;
        }
        case 5:
        case 6:
        case 7:
        case 8:
          if (!model.live.empty()) free_one();
          break;
        case 9:
          if (!model.live.empty()) {
            auto& [block, live] = std::next(model.live.begin(), below(model.live.size()))->second;
            Gate* gate = &gates[below(gates.size())];
            gate->add_work();
            pool.record_use(block, &gate->queue());
            if (std::find(live.users.begin(), live.users.end(), gate) == live.users.end()) live.users.push_back(gate);
          }
          break;
        case 10:
          gates[below(gates.size())].pass();
          break;
        default:
          switch (below(20)) {
            case 0:
              pool.empty_cache();
              break;
            case 1: {
              uint64_t from = owners[below(owners.size())], to = owners[below(owners.size())];
              pool.retire_owner(from, to);
              for (auto& [at, entry] : model.live)
                if (entry.second.owner == from) entry.second.owner = to;
              break;
            }
            default:
              break;
          }
      }
      if (step % 25) continue;
      check_snapshot(pool);
      PoolStats stats = pool.stats();
      CHECK_EQ(stats.allocation[kAll].current, int64_t(model.live.size()));
      CHECK_EQ(stats.allocation[kAll].allocated, model.allocations);
      CHECK_EQ(stats.requested_bytes[kAll].current, model.requested);
      CHECK_EQ(stats.requested_bytes[kAll].peak, model.peak);
      CHECK_EQ(stats.allocated_bytes[kAll].current, model.allocated);
      CHECK_EQ(stats.num_ooms, model.ooms);
      CHECK(stats.reserved_bytes[kAll].current <= int64_t(kCapacity));
    }
    while (!model.live.empty()) free_one();
    for (auto& gate : gates) gate.pass();
    pool.empty_cache();
    CHECK(pool.snapshot().empty());
    CHECK_EQ(pool.stats().active[kAll].current, 0);
    pool.free(pool.allocate(kCapacity, 0));
  }
}

TEST(fuzz_threads) {
  constexpr int kThreads = 4;
  MemoryPool pool(200 * kMiB);
  std::deque<Gate> gates(kThreads);
  std::atomic<int> wrong{0};
  std::atomic<bool> stop{false};
  auto work = [&](uint64_t t) {
    std::mt19937_64 random(t);
    std::vector<std::pair<Block*, uint64_t>> held;
    for (int step = 0; step < 4000; step++) {
      if (held.size() < 30 && random() % 5 < 3) {
        size_t bytes = 1 + random() % (size_t{1} << (3 + random() % 20));
        if (Block* b = pool.try_allocate(bytes, random() % 3)) {
          if (b->requested != bytes) wrong++;
          held.emplace_back(b, random());
          write_tag(b, held.back().second);
          if (MemoryPool::find(b->ptr + bytes - 1) != b) wrong++;
          if (random() % 4 == 0) {
            gates[t].add_work();
            pool.record_use(b, &gates[t].queue());
          }
        }
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        if (!has_tag(held.back().first, held.back().second)) wrong++;
        pool.free(held.back().first);
        held.pop_back();
      }
      if (random() % 50 == 0) gates[t].pass();
      if (random() % 200 == 0) pool.empty_cache();
    }
    for (auto& [b, tag] : held) {
      if (!has_tag(b, tag)) wrong++;
      pool.free(b);
    }
    gates[t].pass();
  };
  std::thread reader([&] {
    while (!stop) {
      for (auto& segment : pool.snapshot())
        if (segment.active > segment.size || segment.allocated > segment.active) wrong++;
      pool.set_capacity(pool.capacity());
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) threads.emplace_back(work, t);
  for (auto& t : threads) t.join();
  stop = true;
  reader.join();
  CHECK_EQ(wrong.load(), 0);
  check_snapshot(pool);
  pool.empty_cache();
  CHECK_EQ(pool.stats().active[kAll].current, 0);
  CHECK(pool.snapshot().empty());
}

}  // namespace
