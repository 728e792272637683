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
#define BOUND(NAME, FIELD)                                                               \
  {                                                                                      \
    NAME, [](Instruction& i, double v) { i.FIELD = static_cast<decltype(i.FIELD)>(v); }, \
        [](const Instruction& i) { return static_cast<double>(i.FIELD); }                \
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
      ATTR(reg),
      BOUND("start", start.value),
      BOUND("stop", stop.value),
      BOUND("step", step.value),
      BOUND("start_reg", start.reg),
      BOUND("start_scale", start.scale),
      BOUND("stop_reg", stop.reg),
      BOUND("stop_scale", stop.scale),
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
  if (bytes_.empty()) return State::none;
  bool any = false, every = true;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    const uint8_t* b = bytes_.data() + row * row_bytes_ + at;
    for (int64_t i = 0; i < bytes; ++i) any |= b[i] != unwritten, every &= b[i] != unwritten;
    return !any || every;  // some and some not: no need to look further
  });
  return every ? State::all : any ? State::some : State::none;
}

int64_t InitMap::first_without_value(const Storage& s, const Access& a) const {
  if (full_) return -1;
  int64_t found = -1;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    if (bytes_.empty()) {
      found = row * row_bytes_ + at;
      return false;
    }
    const uint8_t* b = bytes_.data() + row * row_bytes_ + at;
    const uint8_t* end = b + bytes;
    const auto find = [&](Byte what) {
      const void* p = std::memchr(b, what, end - b);
      return p ? static_cast<const uint8_t*>(p) : end;
    };
    const uint8_t* first = find(unwritten);
    if (has_garbage_) first = std::min({first, find(doubtful), find(garbage)});
    if (first != end) found = first - bytes_.data();
    return first == end;
  });
  return found;
}

int64_t InitMap::first(Byte what) const {
  if (!has_garbage_ || full_) return -1;
  const void* p = std::memchr(bytes_.data(), what, bytes_.size());
  return p ? static_cast<const uint8_t*>(p) - bytes_.data() : -1;
}

void InitMap::mark(const Storage& s, const Access& a) {
  if (full_) return;
  const int64_t total = rows_ * row_bytes_;
  if (a.elements() * size_of(a.dtype) == total) {  // usual: the whole buffer at once
    const Box box = bounding_box(s, a);
    if ((box.partition_end - box.partition_begin) * (box.end - box.begin) == total) return mark_all();
  }
  if (bytes_.empty()) bytes_.assign(total, unwritten);
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    uint8_t* b = bytes_.data() + row * row_bytes_ + at;
    for (int64_t i = 0; i < bytes; ++i) values_ += b[i] != value, b[i] = value;
    return true;
  });
  if (values_ == total) mark_all();
}

std::vector<uint8_t> InitMap::flags(const Storage& s, const Access& a) const {
  const int64_t item = size_of(a.dtype);
  std::vector<uint8_t> out(a.elements(), full_ ? value : unwritten);
  if (full_ || bytes_.empty()) return out;
  size_t next = 0;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    const uint8_t* b = bytes_.data() + row * row_bytes_ + at;
    for (int64_t i = 0; i < bytes; i += item, ++next) {
      uint8_t f = value;
      for (int64_t j = 0; j < item && f != unwritten; ++j)
        if (b[i + j] != value) f = b[i + j];
      out[next] = f;
    }
    return true;
  });
  return out;
}

void InitMap::assign(const Storage& s, const Access& a, const std::vector<uint8_t>& flags) {
  const int64_t item = size_of(a.dtype), total = rows_ * row_bytes_;
  if (bytes_.empty()) {
    bytes_.assign(total, full_ ? value : unwritten);
    values_ = full_ ? total : 0;
    full_ = false;
  }
  size_t next = 0;
  for_each_run(s, a, [&](int64_t row, int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += item, ++next)
      for (int64_t j = 0; j < item; ++j) {
        uint8_t& b = bytes_[row * row_bytes_ + at + i + j];
        values_ += (flags[next] == value) - (b == value);
        b = flags[next];
        has_garbage_ |= b == garbage || b == doubtful;
      }
    return true;
  });
  if (values_ == total) mark_all();
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
    const Storage* latest = nullptr;
    int64_t begin = -1;
    for (const auto& r : live.ranges()) {
      if (storages[r.storage].memory != memory || r.first < 0 || r.first > p.time || r.last < p.time) continue;
      alive.push_back(&storages[r.storage]);
      if (r.first >= begin) begin = r.first, latest = alive.back();
    }
    std::sort(alive.begin(), alive.end(), [](auto* a, auto* b) { return a->row_bytes > b->row_bytes; });
    std::ostringstream out;
    out << (memory == Memory::sbuf ? "SBUF" : "PSUM") << " capacity exceeded: " << p.bytes
        << " bytes per partition are live at once, the limit is " << capacity << "; the largest buffers: ";
    for (size_t i = 0; i < alive.size() && i < 8; ++i)
      out << (i ? ", " : "") << alive[i]->name << " (" << alive[i]->row_bytes << " bytes, @" << alive[i]->source << ")";
    throw CapacityError("allocate", latest->name, out.str(), latest->source);
  }
}

// ---- initialisation ------------------------------------------------------------------------------------------------

namespace {

bool is_matmul(const Instruction& in) { return in.opcode == Opcode::nc_matmul || in.opcode == Opcode::nc_matmul_mx; }

// Which elements of a result depend on an element of an input.
enum class Spread : uint8_t {
  none,      // known only when it runs (choices by value), or not to this core
  element,   // the same one
  turned,    // the one at the transposed place
  shuffled,  // those of the partitions that take its partition
  block,     // those of its 8 partitions that share its scale
  run,       // the one that its run of the row is reduced to
  row,
  column,
  all,
};

Spread spread(const Instruction& in, size_t from, size_t to) {
  const Access &a = in.operand(from).access, &r = in.operand(to).access;
  switch (in.opcode) {
    case Opcode::tensor_copy_predicated:
    case Opcode::range_select:
    case Opcode::affine_select:
    case Opcode::local_gather:
    case Opcode::nc_n_gather:
    case Opcode::gather_flattened:
      if (from == 1) return Spread::none;
      break;
    case Opcode::select_reduce:
      if (from == 2) return Spread::none;
      break;
    case Opcode::quantize_mx:
      return to == 0 ? Spread::block : Spread::none;
    case Opcode::nc_stream_shuffle:
      return Spread::shuffled;
    case Opcode::sendrecv:
    case Opcode::core_barrier:
      return Spread::none;
    case Opcode::nc_matmul:
    case Opcode::nc_matmul_mx:
      if (from == 0) return Spread::element;
      if (in.transpose) return from == 1 ? Spread::turned : Spread::all;
      return from == 1 || from == 3 ? Spread::row : Spread::column;
    case Opcode::nc_transpose:
      return Spread::turned;
    case Opcode::dma_transpose:
      return Spread::element;
    case Opcode::dma_compute:
      return a.elements() == r.elements() ? Spread::element : Spread::all;
    case Opcode::tensor_partition_reduce:
      return Spread::column;
    case Opcode::nonzero_with_count:
    case Opcode::tensor_tensor_scan:
    case Opcode::tensor_scalar_cumulative:
      return Spread::row;
    case Opcode::tensor_reduce:
      return Spread::run;
    default:
      break;
  }
  if (in.spec().locality != Locality::row) return Spread::all;
  if (a.elements() == r.elements()) return Spread::element;
  return r.free_size() == 1 ? Spread::run : Spread::row;
}

// What an instruction reads of an operand: of MX scales only the rows that hold some.
std::vector<Access> parts_read(const Instruction& in, size_t operand) {
  const Access& a = in.operand(operand).access;
  if (in.opcode != Opcode::nc_matmul_mx || operand < 3) return {a};
  std::vector<Access> parts;
  const int64_t partitions = in.operand(1).access.partitions(), groups = partitions / 8;
  for (int64_t group = 0; group < groups; group += 4) {
    Access& part = parts.emplace_back(a);
    part.offset += scale_row(partitions, group) * a.dims[0].stride;
    part.dims[0].size = std::min<int64_t>(4, groups - group);
  }
  return parts;
}

// Does the instruction pass elements on without computing on them?
bool moves(const Instruction& in) {
  return in.opcode == Opcode::dma_copy || in.opcode == Opcode::tensor_copy || in.opcode == Opcode::nc_transpose ||
         in.opcode == Opcode::dma_transpose || in.opcode == Opcode::nc_stream_shuffle ||
         (in.opcode == Opcode::nc_matmul && in.transpose);
}

}  // namespace

void Tracker::allocate(uint32_t storage, const Storage& s) {
  if (maps_.size() <= storage) {
    maps_.resize(storage + 1);
    writer_.resize(storage + 1, 0);
    perhaps_.resize(storage + 1, 0);
    origin_.resize(storage + 1);
  }
  maps_[storage] = InitMap(s.partitions, s.row_bytes, s.external);
  perhaps_[storage] = 0;
  writer_[storage] = 0;
  live_.allocate(storage, s);
}

void Tracker::release(uint32_t storage) { maps_[storage] = InitMap(); }

UninitialisedRead Tracker::error(const std::vector<Storage>& storages, const Read& r) const {
  const Storage& s = storages[r.storage];
  std::ostringstream out;
  out << "reads uninitialised memory @" << r.source << ": " << s.name;
  if (on_chip(s.memory))
    out << " partition " << r.byte / s.row_bytes << ", element " << r.byte % s.row_bytes / size_of(r.dtype);
  else
    out << " element " << r.byte / size_of(r.dtype);
  out << " was never written";
  if (r.writer)
    out << "; the last write to this buffer is @" << r.writer;
  else
    out << "; the buffer was allocated @" << s.source << " and nothing writes it";
  return {spec(r.opcode).name, r.operand, out.str(), r.source};
}

// Where the garbage comes from that is at a byte of what the access reads.
Tracker::Origin Tracker::origin(const Instruction& in, const Access& a, std::string_view operand, int64_t at) const {
  const uint32_t s = a.storage;
  if (maps_[s].written(at) && origin_[s]) return origin_[s];
  return std::make_shared<Read>(in.opcode, operand, s, in.source, writer_[s], a.dtype, at);
}

// Where the garbage comes from that a read of the access gives; null: it gives values.
Tracker::Origin Tracker::read(const std::vector<Storage>& storages, const Instruction& in, const Access& a,
                              std::string_view operand, bool must_be_value) {
  live_.use(a.storage);
  if (!check_ || a.is_dynamic()) return nullptr;
  const InitMap& map = maps_[a.storage];
  const int64_t at = map.first_without_value(storages[a.storage], a);
  if (at < 0) return nullptr;
  const Origin found = origin(in, a, operand, at);
  if (must_be_value || map.query(storages[a.storage], a) == InitMap::State::none) throw error(storages, *found);
  return found;
}

// Null: there are none, or the product is garbage whatever the other factor holds.
std::shared_ptr<const UnwrittenRows> Tracker::unwritten_rows(const std::vector<Storage>& storages,
                                                             const Instruction& in, Origin& found) const {
  if (!check_ || !is_matmul(in) || in.transpose) return nullptr;
  const int64_t rows = in.operand(1).access.partitions();
  auto out = std::make_shared<UnwrittenRows>();
  std::vector<uint8_t> factors(rows, 0);  // that hold nothing, in bits
  for (size_t f = 0; f < 2; ++f) {
    for (size_t i = f + 1; i < in.operands.size(); i += 2) {
      const int64_t group = i > 2 ? 8 : 1;  // rows that a row of the operand stands for
      int64_t row = 0;
      for (const Access& a : parts_read(in, i)) {
        const InitMap& map = maps_[a.storage];
        const int64_t at = a.is_dynamic() ? -1 : map.first_without_value(storages[a.storage], a);
        const int64_t count = a.partitions(), width = a.free_size();
        if (at >= 0) {
          const auto flags = map.flags(storages[a.storage], a);
          for (int64_t r = 0; r < count; ++r) {
            const int64_t values =
                std::count(flags.begin() + r * width, flags.begin() + (r + 1) * width, InitMap::value);
            const bool doubts =
                std::count(flags.begin() + r * width, flags.begin() + (r + 1) * width, InitMap::doubtful) > 0;
            if (values || doubts) continue;  // it spoils some columns at most, or holds values if all is well
            const int64_t place = row + r, begin = place * group, end = std::min(rows, begin + group);
            out->rows.push_back({static_cast<uint8_t>(i), group > 1 ? scale_row(rows, place) : r, place, begin, end});
            for (int64_t k = begin; k < end; ++k) factors[k] |= 1 << f;
          }
          if (!found) found = origin(in, a, in.spec().operands[i].name, at);
        }
        row += count;
      }
    }
  }
  if (out->rows.empty() || std::find(factors.begin(), factors.end(), 3) != factors.end() ||
      std::find(factors.begin(), factors.end(), 0) == factors.end())
    return nullptr;
  for (UnwrittenRows::Row& r : out->rows) {
    const Access& a = in.operand(r.operand % 2 ? 2 : 1).access;
    const auto flags = maps_[a.storage].flags(storages[a.storage], a);
    const int64_t width = a.free_size();
    bool before = false;
    for (int64_t c = 0; c < width; ++c) {
      bool holds = false;
      for (int64_t k = r.begin; k < r.end; ++k) {
        const uint8_t f = flags[k * width + c];
        holds = holds || f == InitMap::value || f == InitMap::doubtful;
      }
      if (holds && !before) r.columns.emplace_back(c, c);
      if (holds) r.columns.back().second = c + 1;
      before = holds;
    }
  }
  out->read = error(storages, *found);
  return out;
}

std::vector<uint8_t> Tracker::flags_read(const std::vector<Storage>& storages, const Instruction& in,
                                         size_t operand) const {
  std::vector<uint8_t> all;
  int64_t width = 1;
  for (const Access& part : parts_read(in, operand)) {
    const auto flags = maps_[part.storage].flags(storages[part.storage], part);
    all.insert(all.end(), flags.begin(), flags.end());
    width = part.free_size();
  }
  if (in.unwritten)
    for (const UnwrittenRows::Row& r : in.unwritten->rows)
      if (r.operand == operand) std::fill_n(all.begin() + r.place * width, width, InitMap::value);
  return all;
}

// Notes what an operand holds after the instruction. without_value: inputs that do not hold values only.
void Tracker::write(const std::vector<Storage>& storages, const Instruction& in, size_t operand,
                    const std::vector<size_t>& without_value, const Origin& origin, bool in_loop) {
  const Access& r = in.operand(operand).access;
  InitMap& map = maps_[r.storage];
  writer_[r.storage] = in.source;
  if (!loops_.empty() && !map.everywhere()) loops_.back().written.push_back(r.storage);
  if (r.is_dynamic()) return map.mark_somewhere();  // where it wrote is known at run time only
  if (in_loop || in.oob_mode == OobMode::skip) map.write_perhaps();
  std::vector<uint8_t> to;
  bool certain = false;  // that some of it is garbage
  for (size_t i : without_value) {
    const Spread how = spread(in, i, operand);
    const Access& a = in.operand(i).access;
    if (how == Spread::none) continue;
    if (to.empty()) to.assign(r.elements(), InitMap::value);
    const std::vector<uint8_t> from = flags_read(storages, in, i);
    const bool on = on_chip(storages[r.storage].memory);
    const int64_t rows = on ? r.partitions() : 1, columns = r.elements() / rows, width = a.free_size();
    const bool keep = i == 0;   // a matmul adds to what was written and overwrites the rest
    std::vector<uint8_t> full;  // rows or columns that are filled, and with what
    for (int64_t e = 0; e < static_cast<int64_t>(from.size()); ++e) {
      if (from[e] == InitMap::value || (keep && from[e] == InitMap::unwritten)) continue;
      const bool stays = (moves(in) && on) || from[e] == InitMap::doubtful;
      const uint8_t f = stays ? from[e] : static_cast<uint8_t>(InitMap::garbage);
      certain = certain || f == InitMap::garbage;
      const int64_t p = e / width, c = e % width;
      auto fill = [&](int64_t first, int64_t step, int64_t count) {
        for (int64_t k = 0; k < count; ++k)
          if (const int64_t at = first + k * step; at < static_cast<int64_t>(to.size()))
            to[at] = to[at] == InitMap::garbage ? to[at] : f;
      };
      auto line = [&](int64_t which, int64_t pitch, int64_t step, int64_t count) {  // once each, or it is quadratic
        if (full.empty()) full.assign(r.elements(), 0);
        if (full[which] != 1 + f) fill(which * pitch, step, count);
        full[which] = 1 + f;
      };
      if (how == Spread::element) fill(e, 1, 1);
      if (how == Spread::turned) fill(c * columns + p, 1, 1);
      if (how == Spread::shuffled)
        for (int64_t q = 0; q < rows; ++q)
          if (const int64_t lane = in.list[q % 32];
              lane != 255 && std::min(q / 32 * 32 + lane, a.partitions() - 1) == p)
            fill(q * columns + c, 1, 1);
      if (how == Spread::block) fill(p / 8 * 8 * columns + c / 4, columns, 8);
      if (how == Spread::run) fill(p * columns + c / std::max<int64_t>(1, width / columns), 1, 1);
      if (how == Spread::row) line(is_matmul(in) ? c % rows : p, columns, 1, columns);
      if (how == Spread::column) line(c % columns, 1, columns, rows);
      if (how == Spread::all) line(0, 0, 1, rows * columns);
    }
  }
  if (in.unwritten) {
    to.resize(r.elements(), InitMap::value);
    std::replace(to.begin(), to.end(), static_cast<uint8_t>(InitMap::value), static_cast<uint8_t>(InitMap::doubtful));
  }
  if (to.empty()) return map.mark(storages[r.storage], r);
  map.assign(storages[r.storage], r, to);
  origin_[r.storage] = origin;
  if (certain && !moves(in) && !first_) first_ = origin;
}

void Tracker::settle(const std::vector<Storage>& storages, const Instruction& in, bool harmless) {
  const Access& r = in.operand(0).access;
  auto flags = maps_[r.storage].flags(storages[r.storage], r);
  const auto is = static_cast<uint8_t>(harmless ? InitMap::value : InitMap::garbage);
  std::replace(flags.begin(), flags.end(), static_cast<uint8_t>(InitMap::doubtful), is);
  maps_[r.storage].assign(storages[r.storage], r, flags);
}

void Tracker::follow_loops(const Instruction& in) {
  if (in.opcode == Opcode::loop_begin || in.opcode == Opcode::while_begin) {
    live_.begin_loop();
    const bool known = in.opcode == Opcode::loop_begin && in.start.reg < 0 && in.stop.reg < 0;
    loops_.push_back({!known || in.start.value >= in.stop.value, {}});
  }
  if (in.opcode == Opcode::loop_end || in.opcode == Opcode::while_end) {
    live_.end_loop();
    Loop loop = std::move(loops_.back());
    loops_.pop_back();
    if (loop.may_skip)
      for (uint32_t s : loop.written) perhaps_[s] = 1;
    if (!loops_.empty())
      loops_.back().written.insert(loops_.back().written.end(), loop.written.begin(), loop.written.end());
  }
}

std::shared_ptr<const RuntimeReads> Tracker::runtime_reads(const std::vector<Storage>& storages,
                                                           const Instruction& in) const {
  if (!check_) return nullptr;
  std::shared_ptr<RuntimeReads> found;
  const auto look = [&](const Access& a, std::string_view operand) {
    const bool by_register = a.reg >= 0 && a.indexing == Access::Indexing::none && !maps_[a.storage].everywhere();
    if (!perhaps_[a.storage] && !by_register) return;
    if (!found) found = std::make_shared<RuntimeReads>();
    std::ostringstream text;
    text << "reads uninitialised memory @" << in.source << ": " << storages[a.storage].name << " was never written";
    if (perhaps_[a.storage])
      text << "; a loop that made no trip would write it @" << writer_[a.storage];
    else if (writer_[a.storage])
      text << " where a register says; the last write to it is @" << writer_[a.storage];
    else
      text << "; it was allocated @" << storages[a.storage].source << " and nothing writes it";
    found->reads.push_back({a, {in.spec().name, operand, text.str(), in.source}});
  };
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    if (!o.is_tile()) continue;
    const OperandSpec& os = in.spec().operands[i];
    if (o.access.index) look(*o.access.index, "index");
    // What a read-modify-write keeps may be anything.
    if (os.role == Role::write || os.role == Role::read_write || in.opcode == Opcode::core_barrier) continue;
    for (const Access& a : parts_read(in, i)) look(a, os.name);
  }
  return found;
}

void Tracker::visit(const std::vector<Storage>& storages, Instruction& in, bool in_loop) {
  const InstructionSpec& sp = in.spec();
  live_.tick();
  follow_loops(in);
  if (in.opcode == Opcode::allocate) {
    maps_[in.reg] = InitMap(storages[in.reg].partitions, storages[in.reg].row_bytes, false);
    perhaps_[in.reg] = 0;
    return;
  }
  in.runtime_reads = runtime_reads(storages, in);
  std::vector<size_t> without_value;
  Origin origin;
  in.unwritten = in_loop ? nullptr : unwritten_rows(storages, in, origin);  // a loop may write them later
  if (!in.unwritten) origin = nullptr;
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    if (!o.is_tile()) continue;
    const Role role = sp.operands[i].role;
    if (in.unwritten && i > 0) {
      live_.use(o.access.storage);
      const auto flags = flags_read(storages, in, i);
      const auto bad = std::find_if(flags.begin(), flags.end(), [](uint8_t f) { return f != InitMap::value; });
      if (bad != flags.end()) without_value.push_back(i);
      continue;
    }
    if (o.access.index) read(storages, in, *o.access.index, "index", true);
    if (role == Role::write || in.opcode == Opcode::core_barrier) continue;
    if (role == Role::read_write && !(is_matmul(in) && in.accumulate == Accumulate::add)) {
      // What a read-modify-write keeps may be garbage; only a matmul's sum is computed from it.
      const InitMap& map = maps_[o.access.storage];
      if (is_matmul(in) && in.accumulate == Accumulate::automatic &&
          (map.first(InitMap::garbage) >= 0 || map.first(InitMap::doubtful) >= 0)) {
        without_value.push_back(i);
        origin = origin ? origin : origin_[o.access.storage];
      }
      continue;
    }
    const bool must_be_value = role == Role::index || in.opcode == Opcode::register_load;
    Origin found;
    for (const Access& a : parts_read(in, i)) {
      const Origin part = read(storages, in, a, sp.operands[i].name, must_be_value);
      found = found ? found : part;
    }
    if (!found) continue;
    without_value.push_back(i);
    origin = origin ? origin : found;
  }
  for (size_t i = 0; i < in.operands.size(); ++i) {
    const Operand& o = in.operands[i];
    const Role role = sp.operands[i].role;
    if (!o.is_tile() || (role != Role::write && role != Role::read_write)) continue;
    live_.use(o.access.storage);
    if (in.opcode == Opcode::quantize_mx && i == 2) {  // beside scales of another tile: nothing but its own rows
      const auto state = maps_[o.access.storage].query(storages[o.access.storage], o.access);
      in.accumulate = state == InitMap::State::none ? Accumulate::overwrite : Accumulate::add;
    }
    if (is_matmul(in) && in.accumulate == Accumulate::automatic && !in_loop) {
      const auto state = maps_[o.access.storage].query(storages[o.access.storage], o.access);
      if (state == InitMap::State::none) in.accumulate = Accumulate::overwrite;
      const bool known = maps_[o.access.storage].everywhere() || !maps_[o.access.storage].full();
      if (state == InitMap::State::all && known) in.accumulate = Accumulate::add;
    }
    write(storages, in, i, without_value, origin, in_loop);
  }
}

bool Tracker::check_results(const std::vector<Storage>& storages, const std::vector<uint32_t>& results) const {
  bool doubt = false;
  for (uint32_t r : results) {
    if (!check_) break;
    doubt = doubt || maps_[r].first(InitMap::doubtful) >= 0;
    if (maps_[r].first(InitMap::garbage) >= 0)
      throw error(storages, *origin_[r])
          .also("; it reaches the result " + storages[r].name + ", last written @" + std::to_string(writer_[r]));
  }
  return doubt;
}

std::string Tracker::first_read(const std::vector<Storage>& storages) const {
  return first_ ? error(storages, *first_).what() : std::string();
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
  follow(in, !open_loops_.empty());
  instructions_.push_back(std::move(in));
  return instructions_.back();
}

void Program::follow(Instruction& in, bool in_loop) {
  tracker_.visit(storages_, in, in_loop);
  shared_uses_.visit(storages_, in, in_loop);
}

void Program::seal(bool several) {
  if (!open_loops_.empty()) throw Error("a loop has no end");
  proves_ = proves_ || several;  // another core's result may depend on it
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
