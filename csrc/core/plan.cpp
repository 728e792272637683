#include "plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "program.h"

namespace neuron {
namespace {

constexpr int64_t kBlockBytes = 128 * 1024;  // of a block of partitions
constexpr uint32_t kMinParts = 4;  // fewer do not keep threads busy: then each instruction is spread over them
constexpr uint32_t kNone = UINT32_MAX;

bool writes(Role r) { return r == Role::write || r == Role::read_write; }

bool same(const Access& a, const Access& b) {
  return a.storage == b.storage && a.dtype == b.dtype && a.offset == b.offset && a.ndim == b.ndim &&
         std::equal(a.dims.begin(), a.dims.begin() + a.ndim, b.dims.begin());
}

// One contiguous run per partition, the rows `pitch` elements apart.
struct Rectangle {
  int64_t offset, pitch, rows, columns;
};
std::optional<Rectangle> rectangle(const Access& a) {
  if (a.is_dynamic() || a.ndim == 0) return std::nullopt;
  int64_t run = 1;
  for (int i = a.ndim - 1; i >= 1; --i) {
    if (a.dims[i].size != 1 && a.dims[i].stride != run) return std::nullopt;
    run *= a.dims[i].size;
  }
  return Rectangle{a.offset, a.dims[0].stride, a.dims[0].size, run};
}

// Lowest and highest element of a partition's pattern, from its first element on.
std::pair<int64_t, int64_t> free_span(const Access& a) {
  int64_t low = 0, high = 0;
  for (int i = 1; i < a.ndim; ++i) (a.dims[i].stride < 0 ? low : high) += a.dims[i].stride * (a.dims[i].size - 1);
  return {low, high};
}

class Planner {
 public:
  Planner(const Program& p, bool several) : storages_(p.storages()), several_(several) {
    plan_.code = p.instructions();
    straight_ = !several && std::none_of(plan_.code.begin(), plan_.code.end(), [](const Instruction& in) {
      return in.spec().rendezvous || (in.spec().locality == Locality::control && in.opcode != Opcode::allocate);
    });
    ranges_ = p.tracker().live().ranges();
  }

  Plan make() {
    if (straight_) {
      for (int pass = 0; pass < 3 && forward_loads(); ++pass) {
      }
      forward_stores();
      discard_dead_results();
      std::erase_if(plan_.code, [](const Instruction& in) { return in.opcode == Opcode::allocate; });
      number_factors();
      split();
    } else {
      plan_.parts.push_back({});
      ends_ = {static_cast<uint32_t>(plan_.code.size())};
    }
    cut_segments();
    keep_rows();
    merge_steps();
    place_buffers();
    return std::move(plan_);
  }

 private:
  const Storage& storage(const Access& a) const { return storages_[a.storage]; }
  bool movable(const Access& a) const { return !a.is_dynamic() && storage(a).address < 0; }
  bool is_copy(const Instruction& in) const {
    if (in.opcode != Opcode::dma_copy && in.opcode != Opcode::tensor_copy) return false;
    const Access &dst = in.operand(0).access, &src = in.operand(1).access;
    return movable(dst) && movable(src) && dst.dtype == src.dtype && dst.storage != src.storage &&
           dst.partitions() == src.partitions() && dst.free_size() == src.free_size();
  }
  // Does the instruction write every element of its result? Gathering ones may skip rows.
  static bool complete(const Instruction& in) {
    const bool known =
        in.spec().locality == Locality::row || in.opcode == Opcode::nc_matmul || in.opcode == Opcode::nc_transpose;
    return known && std::none_of(in.operands.begin(), in.operands.end(),
                                 [](const Operand& o) { return o.is_tile() && o.access.is_dynamic(); });
  }
  bool covers(const Access& a) const {  // the whole buffer?
    const Storage& s = storage(a);
    const auto r = rectangle(a);
    return r && r->rows * r->columns * size_of(a.dtype) == s.partitions * s.row_bytes &&
           (!on_chip(s.memory) || r->columns * size_of(a.dtype) == s.row_bytes);
  }

  // ---- reads of a copy become reads of its source
  struct Copy {
    uint32_t at;
    Rectangle dst, src;
    Access from;
    bool stale = false, keep = false;
    struct Reader {
      uint32_t at;
      int operand;
      Access access;
    };
    std::vector<Reader> readers;
  };

  // Where the elements of an access to the copy are in its source.
  std::optional<Access> mapped(const Copy& c, const Access& a) const {
    if (a.is_dynamic() || a.dtype != c.from.dtype || a.ndim == 0) return std::nullopt;
    const int64_t width = storage(a).row_bytes / size_of(a.dtype);
    const int64_t row = a.offset / width - c.dst.offset / width, column = a.offset % width - c.dst.offset % width;
    if (a.dims[0].size > 1 && (a.dims[0].stride <= 0 || a.dims[0].stride % width)) return std::nullopt;
    const int64_t step = a.dims[0].size > 1 ? a.dims[0].stride / width : 1;
    const auto [low, high] = free_span(a);
    if (row < 0 || row + (a.dims[0].size - 1) * step >= c.dst.rows) return std::nullopt;
    if (column + low < 0 || column + high >= c.dst.columns) return std::nullopt;
    Access out = a;
    out.storage = c.from.storage;
    out.offset = c.src.offset + row * c.src.pitch + column;
    out.dims[0].stride = step * c.src.pitch;
    return out;
  }

  bool forward_loads() {
    std::vector<Copy> copies;
    std::vector<uint32_t> of(storages_.size(), kNone);          // the copy that a storage holds
    std::vector<std::vector<uint32_t>> from(storages_.size());  // copies of a storage
    std::vector<char> dead(plan_.code.size(), 0);
    bool changed = false;
    auto finish = [&](uint32_t storage) {
      if (of[storage] == kNone) return;
      Copy& c = copies[of[storage]];
      of[storage] = kNone;
      std::erase(from[c.from.storage], static_cast<uint32_t>(&c - copies.data()));
      if (c.keep) return;
      for (const auto& r : c.readers) plan_.code[r.at].operands[r.operand].access = r.access;
      dead[c.at] = 1;
      changed = true;
    };
    for (uint32_t i = 0; i < plan_.code.size(); ++i) {
      const Instruction& in = plan_.code[i];
      if (in.opcode == Opcode::allocate) {
        finish(static_cast<uint32_t>(in.reg));
        continue;
      }
      const InstructionSpec& sp = in.spec();
      bool reads_copy = false;
      for (size_t k = 0; k < in.operands.size(); ++k) {
        const Operand& o = in.operands[k];
        if (!o.is_tile()) continue;
        if (o.access.index && of[o.access.index->storage] != kNone) copies[of[o.access.index->storage]].keep = true;
        const Role role = sp.operands[k].role;
        if (role == Role::write || of[o.access.storage] == kNone) continue;
        reads_copy = true;
        Copy& c = copies[of[o.access.storage]];
        auto access = role == Role::read_write || c.stale ? std::nullopt : mapped(c, o.access);
        for (size_t w = 0; w < in.operands.size() && access; ++w)
          if (in.operands[w].is_tile() && writes(sp.operands[w].role) &&
              in.operands[w].access.storage == c.from.storage)
            access.reset();
        if (access)
          c.readers.push_back({i, static_cast<int>(k), *access});
        else
          c.keep = true;
      }
      for (size_t k = 0; k < in.operands.size(); ++k) {
        const Operand& o = in.operands[k];
        if (!o.is_tile() || !writes(sp.operands[k].role)) continue;
        const uint32_t s = o.access.storage;
        for (uint32_t c : from[s]) copies[c].stale = true;
        if (of[s] == kNone) continue;
        Copy& c = copies[of[s]];
        const auto r = rectangle(o.access);
        const bool whole = r && complete(in) && sp.operands[k].role == Role::write && r->offset == c.dst.offset &&
                           r->rows == c.dst.rows && r->columns == c.dst.columns && o.access.dtype == c.from.dtype;
        c.keep = c.keep || !whole;
        finish(s);
      }
      if (reads_copy || !is_copy(in) || !on_chip(storage(in.operand(0).access).memory)) continue;
      const auto dst = rectangle(in.operand(0).access), src = rectangle(in.operand(1).access);
      if (!dst || !src || dst->columns != src->columns) continue;
      const uint32_t to = in.operand(0).access.storage, source = in.operand(1).access.storage;
      of[to] = static_cast<uint32_t>(copies.size());
      from[source].push_back(of[to]);
      copies.push_back({i, *dst, *src, in.operand(1).access, false, false, {}});
    }
    for (uint32_t s = 0; s < storages_.size(); ++s) finish(s);
    remove(dead);
    return changed;
  }

  // ---- results that are only copied to HBM are written there at once
  void forward_stores() {
    struct State {
      uint32_t writer = kNone;  // wrote all that `access` says, and nobody has read it since
      int operand = 0;
      uint32_t copy = kNone;  // read it to copy it to HBM
    };
    std::vector<State> state(storages_.size());
    std::vector<uint32_t> touched(storages_.size(), kNone);
    std::vector<char> dead(plan_.code.size(), 0);
    auto commit = [&](State& s) {
      if (s.copy != kNone) {
        plan_.code[s.writer].operands[s.operand].access = plan_.code[s.copy].operand(0).access;
        dead[s.copy] = 1;
      }
      s = {};
    };
    for (uint32_t i = 0; i < plan_.code.size(); ++i) {
      const Instruction& in = plan_.code[i];
      if (in.opcode == Opcode::allocate) {
        commit(state[in.reg]);
        continue;
      }
      const InstructionSpec& sp = in.spec();
      for (size_t k = 0; k < in.operands.size(); ++k) {
        const Operand& o = in.operands[k];
        if (!o.is_tile()) continue;
        if (o.access.index) state[o.access.index->storage] = {};
        if (sp.operands[k].role == Role::write) continue;
        State& s = state[o.access.storage];
        const bool copies =
            k == 1 && s.writer != kNone && s.copy == kNone && is_copy(in) &&
            !on_chip(storage(in.operand(0).access).memory) &&
            same(o.access, plan_.code[s.writer].operand(s.operand).access) &&
            (touched[in.operand(0).access.storage] == kNone || touched[in.operand(0).access.storage] < s.writer);
        if (copies)
          s.copy = i;
        else
          s = {};
      }
      for (size_t k = 0; k < in.operands.size(); ++k) {
        const Operand& o = in.operands[k];
        if (!o.is_tile() || !writes(sp.operands[k].role)) continue;
        State& s = state[o.access.storage];
        const auto r = rectangle(o.access);
        const bool whole = r && complete(in) && covers(o.access) && sp.operands[k].role == Role::write;
        if (whole)
          commit(s);
        else
          s = {};
        if (whole && sp.locality == Locality::row && in.stage == 0 && on_chip(storage(o.access).memory) &&
            movable(o.access) && storage(o.access).partition_start == 0 && r->offset == 0)
          s = {i, static_cast<int>(k), kNone};
      }
      for (const Operand& o : in.operands)
        if (o.is_tile()) touched[o.access.storage] = i;
    }
    for (State& s : state) commit(s);
    remove(dead);
  }

  // ---- a row that is only reduced need not be stored
  void discard_dead_results() {
    std::vector<char> live(storages_.size(), 0);
    for (size_t i = plan_.code.size(); i-- > 0;) {
      Instruction& in = plan_.code[i];
      if (in.opcode == Opcode::allocate) {
        live[in.reg] = 0;
        continue;
      }
      const InstructionSpec& sp = in.spec();
      const Access* dst = !in.operands.empty() && in.operand(0).is_tile() ? &in.operand(0).access : nullptr;
      const bool reduces = in.opcode == Opcode::activation || in.opcode == Opcode::activate2 ||
                           in.opcode == Opcode::exponential || in.opcode == Opcode::tensor_scalar_reduce;
      if (dst && reduces && movable(*dst) && on_chip(storage(*dst).memory) && !live[dst->storage] &&
          in.reduce_cmd != ReduceCmd::idle)
        in.discard = true;
      for (size_t k = 0; k < in.operands.size(); ++k)
        if (in.operands[k].is_tile() && writes(sp.operands[k].role) && complete(in) && covers(in.operands[k].access))
          live[in.operands[k].access.storage] = 0;
      for (size_t k = 0; k < in.operands.size(); ++k) {
        if (!in.operands[k].is_tile()) continue;
        if (sp.operands[k].role != Role::write) live[in.operands[k].access.storage] = 1;
        if (in.operands[k].access.index) live[in.operands[k].access.index->storage] = 1;
      }
    }
  }

  // ---- matmul factors that occur again and never change are packed once
  void number_factors() {
    std::vector<char> written(storages_.size(), 0);
    for (const Instruction& in : plan_.code)
      for (size_t k = 0; k < in.operands.size(); ++k)
        if (in.operands[k].is_tile() && writes(in.spec().operands[k].role)) written[in.operands[k].access.storage] = 1;
    struct Use {
      uint32_t at;
      int operand;
    };
    std::map<std::pair<uint32_t, int64_t>, std::vector<Use>> uses;  // storage, offset
    for (uint32_t i = 0; i < plan_.code.size(); ++i) {
      const Instruction& in = plan_.code[i];
      if (in.opcode != Opcode::nc_matmul || in.transpose) continue;
      for (int k = 1; k <= 2; ++k)
        if (const Access& a = in.operand(k).access; !written[a.storage] && !a.is_dynamic())
          uses[{a.storage, a.offset}].push_back({i, k});
    }
    for (auto& [place, list] : uses)
      for (size_t x = 0; x < list.size(); ++x) {
        Instruction& first = plan_.code[list[x].at];
        if (first.pack[list[x].operand - 1] >= 0) continue;
        for (size_t y = x + 1; y < list.size(); ++y) {
          Instruction& other = plan_.code[list[y].at];
          if (list[x].operand != list[y].operand || first.perf_mode != other.perf_mode ||
              !same(first.operand(list[x].operand).access, other.operand(list[y].operand).access))
            continue;
          int32_t& number = first.pack[list[x].operand - 1];
          if (number < 0) number = plan_.packs++;
          other.pack[list[y].operand - 1] = number;
        }
      }
  }

  // ---- parts
  uint32_t find(uint32_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void join(uint32_t a, uint32_t b) {
    a = find(a), b = find(b);
    if (a != b) parent_[std::max(a, b)] = std::min(a, b);
  }

  static bool disjoint(const Storage& s, const Access& a, const Access& b) {
    if (!bounding_box(s, a).overlaps(bounding_box(s, b))) return true;
    if (a.is_dynamic() || b.is_dynamic() || a.ndim == 0 || b.ndim == 0 || a.dtype != b.dtype) return false;
    const int64_t pitch = a.dims[0].stride;
    if (pitch <= 0 || pitch != b.dims[0].stride) return false;
    auto columns = [&](const Access& x) {
      const auto [low, high] = free_span(x);
      return std::pair(x.offset % pitch + low, x.offset % pitch + high);
    };
    const auto [a0, a1] = columns(a);
    const auto [b0, b1] = columns(b);
    return a0 >= 0 && b0 >= 0 && a1 < pitch && b1 < pitch && (a1 < b0 || b1 < a0);
  }

  void split() {
    const auto n = static_cast<uint32_t>(plan_.code.size());
    parent_.resize(n);
    std::iota(parent_.begin(), parent_.end(), 0u);
    std::vector<uint32_t> chip(storages_.size(), kNone);
    struct Use {
      uint32_t at;
      const Access* access;
      bool write;
    };
    std::vector<std::vector<Use>> hbm(storages_.size());
    std::array<uint32_t, 4> shared{kNone, kNone, kNone, kNone};  // fixed addresses, random bits, the two accumulators
    std::array<std::vector<uint32_t>, 2> registers;
    bool carried[2] = {false, false};
    auto meet = [&](uint32_t& with, uint32_t i) {
      if (with == kNone)
        with = i;
      else
        join(with, i);
    };
    for (uint32_t i = 0; i < n; ++i) {
      const Instruction& in = plan_.code[i];
      const InstructionSpec& sp = in.spec();
      auto touch = [&](const Access& a, bool write) {
        if (on_chip(storage(a).memory)) {
          meet(chip[a.storage], i);
          if (storage(a).address >= 0) meet(shared[0], i);
        } else {
          hbm[a.storage].push_back({i, &a, write});
        }
      };
      for (size_t k = 0; k < in.operands.size(); ++k) {
        if (!in.operands[k].is_tile()) continue;
        touch(in.operands[k].access, writes(sp.operands[k].role));
        if (in.operands[k].access.index) touch(*in.operands[k].access.index, false);
      }
      switch (in.opcode) {
        case Opcode::dropout:
        case Opcode::rng:
        case Opcode::rand2:
        case Opcode::set_rng_seed:
        case Opcode::rand_set_state:
        case Opcode::rand_get_state:
          meet(shared[1], i);
          break;
        case Opcode::activation:
        case Opcode::activate2:
        case Opcode::exponential:
        case Opcode::tensor_scalar_reduce:
        case Opcode::tensor_scalar_cumulative:
        case Opcode::select_reduce:
        case Opcode::range_select: {
          const bool scalar = in.opcode == Opcode::activation || in.opcode == Opcode::activate2;
          registers[scalar].push_back(i);
          bool result = in.opcode == Opcode::tensor_scalar_cumulative;
          for (size_t k = 1; k < in.operands.size(); ++k)
            result = result || (in.operands[k].is_tile() && writes(sp.operands[k].role));
          const bool fresh = in.reduce_cmd == ReduceCmd::reset_reduce || in.reduce_cmd == ReduceCmd::load_reduce;
          if (!fresh && (result || in.reduce_cmd != ReduceCmd::idle)) carried[scalar] = true;
          break;
        }
        default:
          break;
      }
    }
    for (int r = 0; r < 2; ++r)
      if (carried[r])
        for (uint32_t i : registers[r]) meet(shared[2 + r], i);
    for (uint32_t s = 0; s < storages_.size(); ++s) {
      const auto& uses = hbm[s];
      if (std::none_of(uses.begin(), uses.end(), [](const Use& u) { return u.write; })) continue;
      for (size_t x = 0; x < uses.size(); ++x)
        for (size_t y = uses.size() > 2048 ? 0 : x + 1; y < (uses.size() > 2048 ? 1 : uses.size()); ++y)
          if (uses.size() > 2048 || ((uses[x].write || uses[y].write) && find(uses[x].at) != find(uses[y].at) &&
                                     !disjoint(storages_[s], *uses[x].access, *uses[y].access)))
            join(uses[x].at, uses[y].at);
    }
    uint32_t parts = 0;
    for (uint32_t i = 0; i < n; ++i) parts += find(i) == i;
    if (parts < kMinParts) std::fill(parent_.begin(), parent_.end(), 0u);
    // Parts in the order of their first instructions, each in program order.
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return find(a) < find(b); });
    std::vector<Instruction> code;
    code.reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
      if (i && find(order[i]) != find(order[i - 1])) ends_.push_back(i), plan_.parts.push_back({});
      code.push_back(std::move(plan_.code[order[i]]));
    }
    plan_.code = std::move(code);
    ends_.push_back(n);
    plan_.parts.push_back({});
  }

  void remove(const std::vector<char>& dead) {
    size_t to = 0;
    for (size_t i = 0; i < plan_.code.size(); ++i)
      if (!dead[i]) {
        if (to != i) plan_.code[to] = std::move(plan_.code[i]);
        ++to;
      }
    plan_.code.resize(to);
  }

  // ---- memory: first fit by life
  void place_buffers() {
    plan_.placement.assign(storages_.size(), -1);
    if (!straight_) {
      place(ranges_);
      for (uint32_t s = 0; s < storages_.size(); ++s)
        if (plan_.placement[s] >= 0) plan_.parts[0].storages.push_back(s);
      return;
    }
    std::vector<LiveRanges::Range> life(storages_.size());
    uint32_t i = 0;
    for (size_t p = 0; p < plan_.parts.size(); ++p) {
      std::vector<uint32_t>& mine = plan_.parts[p].storages;
      auto use = [&](const Access& a) {
        if (!on_chip(storage(a).memory) || plan_.row_offset[a.storage] >= 0) return;
        LiveRanges::Range& r = life[a.storage];
        if (r.first < 0) r = {a.storage, i, i}, mine.push_back(a.storage);
        r.last = i;
      };
      for (; i < ends_[p]; ++i)
        for (const Operand& o : plan_.code[i].operands) {
          if (!o.is_tile()) continue;
          use(o.access);
          if (o.access.index) use(*o.access.index);
        }
      std::vector<LiveRanges::Range> ranges;
      for (uint32_t s : mine) ranges.push_back(life[s]);
      place(ranges);
    }
  }

  void place(std::vector<LiveRanges::Range> ranges) {
    std::erase_if(ranges, [](const auto& r) { return r.first < 0; });
    std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (Memory memory : {Memory::sbuf, Memory::psum}) {
      struct Block {
        int64_t begin, end, last;
      };
      std::vector<Block> active;  // by begin
      int64_t fixed = 0;
      for (const auto& r : ranges) {  // addresses that the kernel chose come first, as they are
        const Storage& s = storages_[r.storage];
        if (s.memory != memory || s.address < 0) continue;
        plan_.placement[r.storage] = s.address;
        fixed = std::max(fixed, s.address + s.row_bytes);
      }
      fixed = (fixed + 63) / 64 * 64;
      int64_t top = fixed;
      for (const auto& r : ranges) {
        const Storage& s = storages_[r.storage];
        if (s.memory != memory || s.address >= 0) continue;
        std::erase_if(active, [&](const Block& b) { return b.last < r.first; });
        const int64_t bytes = (s.row_bytes + 63) / 64 * 64;
        int64_t at = fixed;
        auto it = active.begin();
        for (; it != active.end() && it->begin - at < bytes; ++it) at = std::max(at, it->end);
        active.insert(it, {at, at + bytes, r.last});
        plan_.placement[r.storage] = at;
        top = std::max(top, at + bytes);
      }
      // Rows a multiple of a page apart would fight for the same cache sets.
      if (top && top % 512 == 0) top += 64;
      int64_t& pitch = plan_.pitch[memory == Memory::psum];
      pitch = std::max(pitch, top);
    }
  }

  // ---- segments: runs of row-local instructions whose on-chip operands all start at the same partition, so that a
  // block of partitions can go through the whole run. HBM that one of them writes may not be touched by another.
  void cut_segments() {
    struct HbmUse {
      uint32_t storage;
      Box box;
      bool write;
    };
    std::vector<HbmUse> hbm;
    uint32_t begin = 0;
    for (size_t part = 0; part < plan_.parts.size(); ++part) {
      plan_.parts[part].begin = static_cast<uint32_t>(plan_.segments.size());
      hbm.clear();
      int64_t bytes = 1;
      bool in_steps = false;
      for (uint32_t i = begin; i < ends_[part]; ++i) {
        const Instruction& in = plan_.code[i];
        const InstructionSpec& sp = in.spec();
        bool local = sp.locality == Locality::row && in.stage == 0 && !in.runtime_reads;
        int64_t partition = -1, partitions = -1, row = 0;
        std::vector<HbmUse> uses;
        for (size_t k = 0; k < in.operands.size() && local; ++k) {
          const Operand& o = in.operands[k];
          if (!o.is_tile()) continue;
          const Storage& s = storage(o.access);
          if (o.access.is_dynamic()) local = false;
          if (partitions >= 0 && o.access.partitions() != partitions) local = false;
          partitions = o.access.partitions();
          row += o.access.free_size() * size_of(o.access.dtype);
          if (on_chip(s.memory)) {
            const int64_t start = s.partition_start + o.access.offset / (s.row_bytes / size_of(o.access.dtype));
            if (partition >= 0 && start != partition) local = false;
            partition = start;
          } else {
            uses.push_back({o.access.storage, bounding_box(s, o.access), writes(sp.operands[k].role)});
          }
        }
        if (partition < 0) local = in.opcode == Opcode::allocate;  // HBM to HBM
        const auto steps = local && partition >= 0 ? row_steps(storages_, in) : std::nullopt;
        bool joins = local && i > begin && plan_.segments.back().row_local && !plan_.segments.back().gives_way &&
                     steps.has_value() == in_steps;
        for (const HbmUse& u : uses)
          for (const HbmUse& other : hbm)
            if (u.storage == other.storage && (u.write || other.write) && u.box.overlaps(other.box)) joins = false;
        if (joins && hbm.size() < 64) {
          plan_.segments.back().end = i + 1;
        } else {
          plan_.segments.push_back({i, i + 1, local});
          plan_.segments.back().first_group = static_cast<uint32_t>(plan_.groups.size());
          hbm.clear();
          bytes = 1;
          in_steps = steps.has_value();
        }
        if (steps) {
          const auto at = static_cast<uint32_t>(plan_.steps.size());
          plan_.steps.insert(plan_.steps.end(), steps->begin(), steps->end());
          group_steps(plan_.steps, at, partition, partition + partitions, plan_.groups,
                      plan_.segments.back().first_group);
        }
        plan_.segments.back().last_group = static_cast<uint32_t>(plan_.groups.size());
        bytes = std::max(bytes, row);
        if (!in.operands.empty() && in.operand(0).is_tile()) plan_.work += in.operand(0).access.elements();
        plan_.segments.back().block_rows = std::clamp<int64_t>(kBlockBytes / bytes, 4, 16);
        hbm.insert(hbm.end(), uses.begin(), uses.end());
        for (size_t k = 0; k < in.operands.size() && several_; ++k)
          if (in.operands[k].is_tile() && storage(in.operands[k].access).memory == Memory::shared_hbm &&
              writes(sp.operands[k].role))
            plan_.segments.back().gives_way = true;
      }
      begin = ends_[part];
      plan_.parts[part].end = static_cast<uint32_t>(plan_.segments.size());
    }
  }

  // ---- a tile that lives in one segment of steps needs memory for one row
  void keep_rows() {
    plan_.row_offset.assign(storages_.size(), -1);
    for (const RowStep& s : plan_.steps) {
      plan_.line_bytes = std::max<int64_t>(plan_.line_bytes, (s.whole ? s.n * s.count : std::min(s.n, kChunk)) * 4);
      for (const RowOperand* o : {&s.to, &s.a, &s.b, &s.c, &s.d, &s.sum})
        if (o->place == RowOperand::Place::line) plan_.lines = std::max<int64_t>(plan_.lines, o->storage + 1);
    }
    plan_.line_bytes = (plan_.line_bytes + 63) / 64 * 64;
    if (!straight_) return;
    constexpr uint32_t kSeveral = kNone - 1;
    std::vector<uint32_t> home(storages_.size(), kNone);  // the segment that touches a storage
    for (uint32_t g = 0; g < plan_.segments.size(); ++g) {
      const CodeSegment& segment = plan_.segments[g];
      const uint32_t here = segment.first_group < segment.last_group ? g : kSeveral;
      auto touch = [&](uint32_t s) { home[s] = home[s] == kNone || home[s] == here ? here : kSeveral; };
      for (uint32_t i = segment.begin; i < segment.end; ++i)
        for (const Operand& o : plan_.code[i].operands) {
          if (!o.is_tile()) continue;
          touch(o.access.storage);
          if (o.access.index) touch(o.access.index->storage);
        }
    }
    std::vector<int64_t> used(plan_.segments.size(), 0);
    for (uint32_t s = 0; s < storages_.size(); ++s) {
      if (home[s] >= kSeveral || !on_chip(storages_[s].memory) || storages_[s].address >= 0) continue;
      plan_.row_offset[s] = used[home[s]];
      used[home[s]] += (storages_[s].row_bytes + 63) / 64 * 64;
      plan_.row_bytes = std::max(plan_.row_bytes, used[home[s]]);
    }
  }

  void merge_steps() {
    std::vector<uint32_t> last_read(storages_.size(), 0);  // steps up to the last one that reads it
    for (uint32_t i = 0; i < plan_.steps.size(); ++i) {
      const RowStep& s = plan_.steps[i];
      for (const RowOperand* o : {&s.a, &s.b, &s.c, &s.d})
        if (o->place == RowOperand::Place::memory) last_read[o->storage] = i + 1;
    }
    merge_row_steps(plan_.steps, plan_.groups, [&](uint32_t storage, uint32_t step) {
      return plan_.row_offset[storage] >= 0 && last_read[storage] <= step + 1;
    });
    for (const CodeSegment& s : plan_.segments)
      if (s.first_group < s.last_group) {
        const uint32_t begin = plan_.groups[s.first_group].begin, end = plan_.groups[s.last_group - 1].end;
        stream_results(std::span(plan_.steps).subspan(begin, end - begin), storages_);
      }
  }

  const std::vector<Storage>& storages_;
  bool several_, straight_ = false;
  std::vector<LiveRanges::Range> ranges_;
  Plan plan_;
  std::vector<uint32_t> parent_;
  std::vector<uint32_t> ends_;  // of the parts, in code
};

}  // namespace

Plan make_plan(const Program& program, bool several) { return Planner(program, several).make(); }

}  // namespace neuron
