#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "error.h"

namespace neuron {

int64_t Access::elements() const {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= dims[i].size;
  return n;
}

int64_t Access::free_size() const {
  int64_t n = 1;
  for (int i = 1; i < ndim; ++i) n *= dims[i].size;
  return n;
}

std::span<const Attribute> attributes() {
#define ATTR(FIELD)                                                                                              \
  {                                                                                                              \
    #FIELD, [](Instruction& i, double v) { i.FIELD = static_cast<decltype(i.FIELD)>(static_cast<int64_t>(v)); }, \
        [](const Instruction& i) { return static_cast<double>(i.FIELD); }                                        \
  }
#define BOUND(NAME, FIELD)                                                                          \
  {                                                                                                 \
    #NAME, [](Instruction& i, double v) { i.NAME.FIELD = static_cast<decltype(i.NAME.FIELD)>(v); }, \
        [](const Instruction& i) { return static_cast<double>(i.NAME.FIELD); }                      \
  }
  static const std::vector<Attribute> table = {
      ATTR(op0),
      ATTR(op1),
      ATTR(reduce_op),
      ATTR(function),
      ATTR(reduce_cmd),
      ATTR(oob_mode),
      ATTR(dge_mode),
      ATTR(perf_mode),
      ATTR(accumulate),
      ATTR(reverse0),
      ATTR(reverse1),
      ATTR(negate),
      ATTR(transpose),
      ATTR(offset),
      ATTR(channel_multiplier),
      ATTR(count),
      ATTR(group),
      {"value", [](Instruction& i, double v) { i.value = v; }, [](const Instruction& i) { return i.value; }},
      ATTR(tile_row),
      ATTR(tile_column),
      ATTR(reg),
      BOUND(start, value),
      BOUND(stop, value),
      BOUND(step, value),
      {"start_reg", [](Instruction& i, double v) { i.start.reg = static_cast<int>(v); },
       [](const Instruction& i) { return static_cast<double>(i.start.reg); }},
      {"stop_reg", [](Instruction& i, double v) { i.stop.reg = static_cast<int>(v); },
       [](const Instruction& i) { return static_cast<double>(i.stop.reg); }},
  };
#undef ATTR
#undef BOUND
  return table;
}

// ---- where an access lies ------------------------------------------------------------------------------------------

namespace {

// Calls visit(row, first byte within the row, bytes) for every contiguous run of the access.
template <class F>
void for_each_run(const Storage& s, const Access& a, F&& visit) {
  const int64_t item = size_of(a.dtype);
  const bool chip = on_chip(s.memory);
  const int64_t row_elements = chip ? s.row_bytes / item : INT64_MAX;
  const int64_t row0 = chip ? a.offset / row_elements : 0;
  const int64_t first = chip ? a.offset % row_elements : a.offset;
  std::array<Dim, kMaxDims> d{};
  int n = 0;
  int64_t rows = 1;
  for (int i = 0; i < a.ndim; ++i) {
    if (chip && i == 0) {
      rows = a.dims[0].size;
      continue;
    }
    if (a.dims[i].size == 1) continue;
    if (n && d[n - 1].stride == a.dims[i].stride * a.dims[i].size)
      d[n - 1] = {a.dims[i].stride, d[n - 1].size * a.dims[i].size};
    else
      d[n++] = a.dims[i];
  }
  int64_t run = 1;
  if (n && d[n - 1].stride == 1) run = d[--n].size;
  for (int64_t r = 0; r < rows; ++r) {
    std::array<int64_t, kMaxDims> at{};
    int64_t position = first;
    for (;;) {
      if (!visit(row0 + r, position * item, run * item)) return;
      int i = n - 1;
      for (; i >= 0; --i) {
        position += d[i].stride;
        if (++at[i] < d[i].size) break;
        position -= d[i].stride * d[i].size;
        at[i] = 0;
      }
      if (i < 0) break;
    }
  }
}

}  // namespace

Box bounding_box(const Storage& s, const Access& a) {
  const int64_t item = size_of(a.dtype);
  if (a.is_dynamic()) return {0, s.partitions, 0, s.row_bytes};
  int64_t low = a.offset, high = a.offset;
  const bool chip = on_chip(s.memory);
  for (int i = chip ? 1 : 0; i < a.ndim; ++i) {
    const int64_t span = a.dims[i].stride * (a.dims[i].size - 1);
    (span < 0 ? low : high) += span;
  }
  if (!chip) return {0, 1, low * item, (high + 1) * item};
  const int64_t row_elements = s.row_bytes / item, p = a.offset / row_elements;
  const int64_t base = p * row_elements;
  return {p, p + a.partitions(), (low - base) * item, (high - base + 1) * item};
}

InitMap::State InitMap::query(const Storage& s, const Access& a) const {
  if (full_) return State::all;
  if (bits_.empty()) return State::none;
  bool any = false, every = true;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    const uint8_t* b = bits_.data() + row * row_bytes_ + at;
    for (int64_t i = 0; i < bytes; ++i) any |= b[i], every &= b[i];
    return !any || every;  // some and some not: no need to look further
  });
  return every ? State::all : any ? State::some : State::none;
}

int64_t InitMap::first_unwritten(const Storage& s, const Access& a) const {
  if (full_) return -1;
  int64_t found = -1;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    if (bits_.empty()) {
      found = row * row_bytes_ + at;
      return false;
    }
    const uint8_t* b = bits_.data() + row * row_bytes_ + at;
    if (const void* zero = std::memchr(b, 0, bytes)) {
      found = static_cast<const uint8_t*>(zero) - bits_.data();
      return false;
    }
    return true;
  });
  return found;
}

void InitMap::mark(const Storage& s, const Access& a) {
  if (full_) return;
  const int64_t total = rows_ * row_bytes_;
  if (a.elements() * size_of(a.dtype) == total && bits_.empty()) {  // usual: the whole buffer at once
    const Box box = bounding_box(s, a);
    if ((box.partition_end - box.partition_begin) * (box.end - box.begin) == total) return mark_all();
  }
  if (bits_.empty()) bits_.assign(total, 0);
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    uint8_t* b = bits_.data() + row * row_bytes_ + at;
    for (int64_t i = 0; i < bytes; ++i) count_ += !b[i], b[i] = 1;
    return true;
  });
  if (count_ == total) mark_all();
}

std::vector<uint8_t> InitMap::flags(const Storage& s, const Access& a) const {
  const int64_t item = size_of(a.dtype);
  std::vector<uint8_t> out;
  out.reserve(a.elements());
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += item) {
      bool all = true;
      for (int64_t b = 0; b < item; ++b) all = all && written(row * row_bytes_ + at + i + b);
      out.push_back(all);
    }
    return true;
  });
  return out;
}

void InitMap::assign(const Storage& s, const Access& a, const std::vector<uint8_t>& flags) {
  const int64_t item = size_of(a.dtype), total = rows_ * row_bytes_;
  if (bits_.empty()) {
    bits_.assign(total, full_);
    count_ = full_ ? total : 0;
    full_ = false;
  }
  size_t next = 0;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += item, ++next)
      for (int64_t b = 0; b < item; ++b) {
        uint8_t& bit = bits_[row * row_bytes_ + at + i + b];
        count_ += flags[next] - bit;
        bit = flags[next];
      }
    return true;
  });
  if (count_ == total) mark_all();
}

// ---- lives ---------------------------------------------------------------------------------------------------------

void LiveRanges::allocate(uint32_t storage, const Storage& s) {
  if (ranges_.size() <= storage) ranges_.resize(storage + 1);
  ranges_[storage].storage = storage;
}

void LiveRanges::use(uint32_t storage) {
  Range& r = ranges_[storage];
  if (r.first < 0) r.first = now_;
  r.last = now_;
  for (Loop& loop : loops_) loop.used.push_back(storage);
}

void LiveRanges::begin_loop() { loops_.push_back({now_, {}}); }

void LiveRanges::end_loop() {
  // What lives before the loop and is used in it lives to its end.
  for (uint32_t s : loops_.back().used)
    if (ranges_[s].first < loops_.back().begin) ranges_[s].last = now_;
  loops_.pop_back();
}

Program::Peak Program::peak(const std::vector<Storage>& storages, const LiveRanges& live, Memory memory) {
  std::vector<std::pair<int64_t, int64_t>> events;  // time, bytes
  for (const auto& r : live.ranges()) {
    const Storage& s = storages[r.storage];
    if (s.memory != memory || r.first < 0 || s.address >= 0) continue;
    const int64_t unit = memory == Memory::psum ? kPsumBankBytes : 1;
    const int64_t bytes = (s.row_bytes + unit - 1) / unit * unit;
    events.emplace_back(2 * r.first, bytes);
    events.emplace_back(2 * r.last + 1, -bytes);
  }
  std::sort(events.begin(), events.end(), [](auto& a, auto& b) { return a.first < b.first; });
  Peak peak;
  int64_t bytes = 0;
  for (auto [time, delta] : events)
    if ((bytes += delta) > peak.bytes) peak = {bytes, time / 2};
  return peak;
}

void Program::check_capacity(const std::vector<Storage>& storages, const LiveRanges& live, int64_t sbuf_bytes) {
  for (auto [memory, capacity] : {std::pair{Memory::sbuf, sbuf_bytes}, std::pair{Memory::psum, kPsumBytes}}) {
    const Peak p = peak(storages, live, memory);
    if (p.bytes <= capacity) continue;
    std::vector<const Storage*> alive;
    for (const auto& r : live.ranges())
      if (storages[r.storage].memory == memory && r.first >= 0 && r.first <= p.time && r.last >= p.time)
        alive.push_back(&storages[r.storage]);
    std::sort(alive.begin(), alive.end(), [](auto* a, auto* b) { return a->row_bytes > b->row_bytes; });
    std::ostringstream out;
    out << (memory == Memory::sbuf ? "SBUF" : "PSUM") << " capacity exceeded: " << p.bytes
        << " bytes per partition are live at once, the limit is " << capacity << "; the largest buffers: ";
    for (size_t i = 0; i < alive.size() && i < 8; ++i)
      out << (i ? ", " : "") << alive[i]->name << " (" << alive[i]->row_bytes << " bytes, @" << alive[i]->source << ")";
    throw CapacityError(out.str());
  }
}

// ---- initialisation ------------------------------------------------------------------------------------------------

void Tracker::allocate(uint32_t storage, const Storage& s) {
  if (maps_.size() <= storage) maps_.resize(storage + 1), writer_.resize(storage + 1, 0);
  maps_[storage] = InitMap(s.partitions, s.row_bytes, s.external);
  writer_[storage] = 0;
  live_.allocate(storage, s);
}

void Tracker::release(uint32_t storage) { maps_[storage] = InitMap(); }

bool Tracker::move(const std::vector<Storage>& storages, const Instruction& in) {
  const bool transpose = in.opcode == Opcode::nc_transpose || (in.opcode == Opcode::nc_matmul && in.transpose);
  if (!transpose && in.opcode != Opcode::dma_copy && in.opcode != Opcode::tensor_copy) return false;
  const Access &dst = in.operand(0).access, &src = in.operand(1).access;
  if (dst.is_dynamic() || src.is_dynamic() || dst.elements() != src.elements()) return false;
  if (maps_[src.storage].first_unwritten(storages[src.storage], src) < 0) return false;
  const std::vector<uint8_t> from = maps_[src.storage].flags(storages[src.storage], src);
  if (std::none_of(from.begin(), from.end(), [](uint8_t f) { return f; })) return false;  // nothing to move: a mistake
  std::vector<uint8_t> to = from;
  if (transpose) {
    const int64_t rows = src.partitions(), columns = src.free_size();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
  for (size_t i = 0; i < in.operands.size(); ++i)
    if (in.operands[i].is_tile()) live_.use(in.operands[i].access.storage);
  maps_[dst.storage].assign(storages[dst.storage], dst, to);
  writer_[dst.storage] = in.source;
  return true;
}

void Tracker::visit(const std::vector<Storage>& storages, Instruction& in, bool in_loop) {
  const InstructionSpec& sp = in.spec();
  live_.tick();
  if (in.opcode == Opcode::loop_begin || in.opcode == Opcode::while_begin) live_.begin_loop();
  if (in.opcode == Opcode::loop_end || in.opcode == Opcode::while_end) live_.end_loop();
  if (in.opcode == Opcode::allocate) {
    maps_[in.reg] = InitMap(storages[in.reg].partitions, storages[in.reg].row_bytes, false);
    return;
  }
  if (check_ && move(storages, in)) return;
  const bool matmul = in.opcode == Opcode::nc_matmul || in.opcode == Opcode::nc_matmul_mx;
  auto read = [&](const Access& a, std::string_view name) {
    live_.use(a.storage);
    if (!check_ || a.is_dynamic()) return;
    const int64_t at = maps_[a.storage].first_unwritten(storages[a.storage], a);
    if (at < 0) return;
    const Storage& s = storages[a.storage];
    std::ostringstream out;
    out << sp.name << " " << name << " reads uninitialised memory: " << s.name;
    if (on_chip(s.memory))
      out << " partition " << at / s.row_bytes << ", element " << at % s.row_bytes / size_of(a.dtype);
    else
      out << " element " << at / size_of(a.dtype);
    out << " was never written";
    if (writer_[a.storage])
      out << "; the last write to this buffer is @" << writer_[a.storage];
    else
      out << "; the buffer was allocated @" << s.source << " and nothing writes it";
    throw UninitialisedRead(out.str());
  };
  std::vector<int64_t> garbage;  // partitions of the result
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    if (!o.is_tile()) continue;
    const Role role = sp.operands[i].role;
    if (o.access.index) read(*o.access.index, "index");
    if (role == Role::write) continue;
    // What a read-modify-write keeps may be garbage; only matmul's explicit sum needs it.
    if (role == Role::read_write) {
      if (matmul && in.accumulate == Accumulate::add) read(o.access, sp.operands[i].name);
      continue;
    }
    if (in.opcode == Opcode::core_barrier) continue;
    if (in.opcode == Opcode::sendrecv &&  // moves data: what was not written may go along
        maps_[o.access.storage].query(storages[o.access.storage], o.access) != InitMap::State::none) {
      live_.use(o.access.storage);
      continue;
    }
    if (in.opcode == Opcode::nonzero_with_count) {  // every 16th partition by itself: garbage in, garbage out
      Access row = o.access;
      row.dims[0].size = 1;
      for (int64_t p = 0; p < o.access.partitions(); p += 16) {
        row.offset = o.access.offset + p * o.access.dims[0].stride;
        if (maps_[row.storage].first_unwritten(storages[row.storage], row) >= 0) garbage.push_back(p);
      }
      if (static_cast<int64_t>(garbage.size()) * 16 < o.access.partitions()) {
        live_.use(row.storage);
        continue;
      }
    }
    read(o.access, sp.operands[i].name);
  }
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    const Role role = sp.operands[i].role;
    if (!o.is_tile() || (role != Role::write && role != Role::read_write)) continue;
    const Access& a = o.access;
    live_.use(a.storage);
    if (matmul && in.accumulate == Accumulate::automatic && !in_loop) {
      const auto state = maps_[a.storage].query(storages[a.storage], a);
      if (state == InitMap::State::none) in.accumulate = Accumulate::overwrite;
      if (state == InitMap::State::all) in.accumulate = Accumulate::add;
    }
    if (a.is_dynamic())
      maps_[a.storage].mark_all();  // where it wrote is known at run time only
    else
      maps_[a.storage].mark(storages[a.storage], a);
    for (int64_t p : garbage) {
      Access row = a;
      row.dims[0].size = 1;
      row.offset = a.offset + p * a.dims[0].stride;
      maps_[a.storage].assign(storages[a.storage], row, std::vector<uint8_t>(row.elements(), 0));
    }
    writer_[a.storage] = in.source;
  }
}

// ---- building ------------------------------------------------------------------------------------------------------

uint32_t Program::add_storage(Storage s) {
  storages_.push_back(std::move(s));
  const auto id = static_cast<uint32_t>(storages_.size() - 1);
  tracker_.allocate(id, storages_[id]);
  return id;
}

Instruction& Program::append(Instruction in) {
  const auto index = static_cast<uint32_t>(instructions_.size());
  if (in.opcode == Opcode::loop_begin || in.opcode == Opcode::while_begin) open_loops_.push_back(index);
  if (in.opcode == Opcode::loop_end || in.opcode == Opcode::while_end) {
    if (open_loops_.empty()) throw Error("loop end without a loop");
    in.match = open_loops_.back();
    instructions_[in.match].match = index;
    open_loops_.pop_back();
  }
  tracker_.visit(storages_, in, !open_loops_.empty());
  instructions_.push_back(std::move(in));
  return instructions_.back();
}

void Program::seal(int64_t sbuf_bytes, bool several) {
  if (!open_loops_.empty()) throw Error("a loop has no end");
  check_capacity(storages_, tracker_.live(), sbuf_bytes);
  plan_ = make_plan(*this, several);
}

std::string disassemble(const std::vector<Storage>& storages, const Instruction& in) {
  static const Instruction defaults;
  const InstructionSpec& sp = in.spec();
  std::ostringstream out;
  out << kEngineNames[static_cast<int>(in.engine)] << " " << sp.name;
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    if (o.kind == Operand::Kind::none) continue;
    out << " " << sp.operands[i].name << "=";
    if (o.kind == Operand::Kind::immediate) out << o.immediate;
    if (o.kind == Operand::Kind::reg) out << "r" << o.reg;
    if (!o.is_tile()) continue;
    const Access& a = o.access;
    out << storages[a.storage].name << ":" << info(a.dtype).name << "+" << a.offset << "[";
    for (int d = 0; d < a.ndim; ++d) out << (d ? "," : "") << a.dims[d].stride << ":" << a.dims[d].size;
    out << "]";
    if (a.reg >= 0) out << "+r" << a.reg << "*" << a.reg_stride;
    if (a.index) out << "@" << storages[a.index->storage].name;
  }
  for (const Attribute& a : attributes()) {
    const double v = a.get(in);
    if (v == a.get(defaults)) continue;
    out << " " << a.name << "=";
    if (a.name == "op0" || a.name == "op1" || a.name == "reduce_op")
      out << info(static_cast<AluOp>(static_cast<int>(v))).name;
    else if (a.name == "function")
      out << kFunctionTable[static_cast<int>(v)].name;
    else
      out << v;
  }
  if (!in.list.empty()) {
    out << " list=[";
    for (size_t i = 0; i < in.list.size(); ++i) out << (i ? "," : "") << in.list[i];
    out << "]";
  }
  return out.str();
}

}  // namespace neuron
