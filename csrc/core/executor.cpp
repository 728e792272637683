#include "executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <sstream>

#include "error.h"
#include "simd/kernels.h"

namespace neuron {

namespace {

constexpr int64_t kParallelWork = 1 << 14;  // elements that pay for waking threads
constexpr int64_t kPackBytes = 8 << 20;     // packed matmul factors that a thread keeps

const Kernels& K() { return kernels(); }

float* scratch(int slot, int64_t n) {
  struct Slot {
    Aligned block;
    int64_t size = 0;
  };
  thread_local std::array<Slot, 9> slots;
  Slot& s = slots[slot];
  if (s.size < n) s.block = new_aligned(n * static_cast<int64_t>(sizeof(float))), s.size = n;
  return reinterpret_cast<float*>(s.block.get());
}

// Calls visit(pointer, stride, count) for the inner runs of elements [begin, begin + n) of a row.
template <class F>
void for_runs(const View& v, int64_t row, int64_t begin, int64_t n, F&& visit) {
  char* base = v.row(row);
  const int64_t item = size_of(v.dtype);
  if (v.ndim <= 1) {
    const int64_t stride = v.ndim ? v.dims[0].stride : item;
    visit(base + begin * stride, stride, n);
    return;
  }
  std::array<int64_t, kMaxDims> at{};
  int64_t rest = begin;
  char* p = base;
  for (int i = v.ndim - 1; i >= 0; --i) {
    at[i] = rest % v.dims[i].size;
    rest /= v.dims[i].size;
    p += at[i] * v.dims[i].stride;
  }
  const int last = v.ndim - 1;
  while (n > 0) {
    const int64_t run = std::min(n, v.dims[last].size - at[last]);
    visit(p, v.dims[last].stride, run);
    n -= run;
    p += run * v.dims[last].stride;
    at[last] += run;
    for (int i = last; i > 0 && at[i] == v.dims[i].size; --i) {
      p += v.dims[i - 1].stride - v.dims[i].size * v.dims[i].stride;
      at[i] = 0;
      ++at[i - 1];
    }
  }
}

// Elements [begin, begin + n) of a row as fp32: where they lie, or converted into `to`.
const float* load(const View& v, int64_t row, int64_t begin, int64_t n, float* to) {
  if (v.contiguous && v.dtype == Dtype::float32) return reinterpret_cast<const float*>(v.row(row)) + begin;
  const auto f = K().load[static_cast<int>(v.dtype)];
  float* out = to;
  for_runs(v, row, begin, n, [&](char* p, int64_t stride, int64_t count) {
    f(p, stride, count, out);
    out += count;
  });
  return to;
}

const int32_t* load_int(const View& v, int64_t row, int64_t begin, int64_t n, int32_t* to, bool unsigned_bits = false) {
  Dtype t = v.dtype;
  if (unsigned_bits) t = t == Dtype::int8 ? Dtype::uint8 : t == Dtype::int16 ? Dtype::uint16 : t;
  const auto f = K().load_int[static_cast<int>(t)];
  int32_t* out = to;
  for_runs(v, row, begin, n, [&](char* p, int64_t stride, int64_t count) {
    f(p, stride, count, out);
    out += count;
  });
  return to;
}

void clear(const View& v, int64_t row) {
  const int64_t item = size_of(v.dtype);
  for_runs(v, row, 0, v.free, [&](char* p, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; ++i) std::memset(p + i * stride, 0, item);
  });
}

// Are elements of a row 0, of either sign?
bool is_zero(const View& v, int64_t row, int64_t begin, int64_t count) {
  const int64_t item = size_of(v.dtype);
  const bool four = v.dtype == Dtype::float4_e2m1fn_x4, packed = is_packed(v.dtype);
  bool zero = true;
  for_runs(v, row, begin, count, [&](const char* p, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t b = 0; b < item; ++b) {
        const int signs = four ? 0x88 : packed || b == item - 1 ? 0x80 : 0;
        zero = zero && !(p[i * stride + b] & ~signs & 0xff);
      }
  });
  return zero;
}

float* target(const View& v, int64_t row, int64_t begin, float* fallback) {
  const bool direct = v.contiguous && v.dtype == Dtype::float32 && !v.discard;
  return direct ? reinterpret_cast<float*>(v.row(row)) + begin : fallback;
}

void store(const View& v, int64_t row, int64_t begin, int64_t n, const float* from) {
  if (v.discard) return;
  if (v.contiguous && v.dtype == Dtype::float32 && reinterpret_cast<float*>(v.row(row)) + begin == from) return;
  const auto f = K().store[static_cast<int>(v.dtype)];
  for_runs(v, row, begin, n, [&](char* p, int64_t stride, int64_t count) {
    f(from, count, p, stride);
    from += count;
  });
}

void store_int(const View& v, int64_t row, int64_t begin, int64_t n, const int32_t* from) {
  const auto f = K().store_int[static_cast<int>(v.dtype)];
  for_runs(v, row, begin, n, [&](char* p, int64_t stride, int64_t count) {
    f(from, count, p, stride);
    from += count;
  });
}

void copy_strided(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t n, int64_t item) {
  if (to_stride == item && from_stride == item) {
    std::memmove(to, from, n * item);
    return;
  }
  auto each = [&]<class T>(T) {
    for (int64_t i = 0; i < n; ++i) {
      T v;
      std::memcpy(&v, from + i * from_stride, sizeof v);
      std::memcpy(to + i * to_stride, &v, sizeof v);
    }
  };
  if (item == 4)
    each(uint32_t{});
  else if (item == 2)
    each(uint16_t{});
  else
    each(uint8_t{});
}

// A whole view as one linear pattern, for copies whose two sides divide their elements differently.
View flatten(const View& v) {
  View f = v;
  f.rows = 1;
  f.pitch = 0;
  f.free = v.rows * v.free;
  if (v.rows == 1) return f;
  const int64_t item = size_of(v.dtype);
  f.ndim = 0;
  auto push = [&](Dim d) {
    if (d.size == 1) return;
    if (f.ndim && f.dims[f.ndim - 1].stride == d.stride * d.size)
      f.dims[f.ndim - 1] = {d.stride, f.dims[f.ndim - 1].size * d.size};
    else
      f.dims[f.ndim++] = d;
  };
  push({v.pitch, v.rows});
  if (v.ndim == 0 && v.free > 1) push({item, v.free});
  for (int i = 0; i < v.ndim; ++i) push(v.dims[i]);
  f.contiguous = f.ndim == 0 || (f.ndim == 1 && f.dims[0].stride == item);
  return f;
}

// Row `from_row` of `from` to row `to_row` of `to`, element by element.
void copy_row(const View& to, int64_t to_row, const View& from, int64_t from_row) {
  const int64_t n = to.free;
  if (to.dtype != from.dtype) {
    float* buffer = scratch(0, kChunk);
    for (int64_t i = 0; i < n; i += kChunk) {
      const int64_t m = std::min(kChunk, n - i);
      store(to, to_row, i, m, load(from, from_row, i, m, buffer));
    }
    return;
  }
  const int64_t item = size_of(to.dtype);
  if (to.contiguous && from.contiguous) {
    std::memmove(to.row(to_row), from.row(from_row), n * item);
    return;
  }
  int64_t at = 0;
  for_runs(to, to_row, 0, n, [&](char* p, int64_t stride, int64_t count) {
    for_runs(from, from_row, at, count, [&](char* q, int64_t from_stride, int64_t m) {
      copy_strided(p, stride, q, from_stride, m, item);
      p += m * stride;
    });
    at += count;
  });
}

void copy_view(const View& to, const View& from) {
  if (to.rows == from.rows) {
    for (int64_t r = 0; r < to.rows; ++r) copy_row(to, r, from, r);
  } else {
    copy_row(flatten(to), 0, flatten(from), 0);
  }
}

// Contiguous memory of the same shape and type.
struct Staged {
  std::vector<char> memory;
  View view;
  explicit Staged(const View& like) : memory(like.rows * like.free * size_of(like.dtype)), view(like) {
    view.base = memory.data();
    view.pitch = like.free * size_of(like.dtype);
    view.ndim = like.free > 1 ? 1 : 0;
    view.dims[0] = {size_of(like.dtype), like.free};
    view.contiguous = true;
  }
};

void merge(View& v, const Dim* dims, int n) {
  const int64_t item = size_of(v.dtype);
  v.free = 1;
  for (int i = 0; i < n; ++i) {
    v.free *= dims[i].size;
    if (dims[i].size == 1) continue;
    const Dim d{dims[i].stride * item, dims[i].size};
    if (v.ndim && v.dims[v.ndim - 1].stride == d.stride * d.size)
      v.dims[v.ndim - 1] = {d.stride, v.dims[v.ndim - 1].size * d.size};
    else
      v.dims[v.ndim++] = d;
  }
  v.contiguous = v.ndim == 0 || (v.ndim == 1 && v.dims[0].stride == item);
}

// Rows as the vector, when every row has one element.
View turned(const View& v, int64_t first, int64_t count) {
  View t = v;
  t.base = v.row(first);
  t.rows = 1;
  t.free = count;
  t.ndim = 1;
  t.dims[0] = {v.pitch, count};
  t.contiguous = v.pitch == size_of(v.dtype);
  return t;
}

}  // namespace

namespace {
ParallelFor& installed() {
  static ParallelFor f = [](int64_t n, const Range& body) { body(0, n); };
  return f;
}
}  // namespace

void set_parallel_for(ParallelFor f) { installed() = std::move(f); }
const ParallelFor& parallel_for() { return installed(); }

Aligned new_aligned(int64_t bytes) {
  constexpr int64_t kLine = 64;
  Aligned block(static_cast<char*>(std::aligned_alloc(kLine, std::max(kLine, (bytes + kLine - 1) / kLine * kLine))));
  if (!block) throw std::bad_alloc();
  return block;
}

Xorwow::Xorwow(uint32_t seed) {
  uint64_t x = seed + 0x9e3779b97f4a7c15ull;
  for (uint32_t& word : s) {  // splitmix64 spreads the seed
    x += 0x9e3779b97f4a7c15ull;
    uint64_t z = x;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    word = static_cast<uint32_t>(z ^ (z >> 31)) | 1u;
  }
}

uint32_t Xorwow::next() {
  uint32_t t = s[4];
  const uint32_t first = s[0];
  s[4] = s[3];
  s[3] = s[2];
  s[2] = s[1];
  s[1] = first;
  t ^= t >> 2;
  t ^= t << 1;
  t ^= first ^ (first << 4);
  s[0] = t;
  s[5] += 362437;
  return t + s[5];
}

// ---- semantics -----------------------------------------------------------------------------------------------------

// What a thread that runs parts of a program has of its own.
struct Core::Lane {
  std::array<Aligned, 2> arena;  // SBUF, PSUM
  std::array<int64_t, 2> arena_bytes{};
  Registers registers;
  // Packed matmul factors by number; the oldest give their memory up first.
  std::vector<std::vector<float>> packs, spare;
  std::deque<int32_t> kept;
  int64_t pack_bytes = 0;

  void begin(const Plan& plan) {
    for (int i = 0; i < 2; ++i) {
      const int64_t bytes = plan.pitch[i] * kPartitions;
      if (arena_bytes[i] < bytes) arena[i] = new_aligned(bytes), arena_bytes[i] = bytes;
    }
    while (!kept.empty()) drop();
    registers = {};
    packs.resize(std::max<size_t>(packs.size(), plan.packs));
  }
  // The packed factor, or where to pack it to (then `found` is false).
  float* pack(int32_t number, int64_t size, bool& found) {
    std::vector<float>& p = packs[number];
    found = !p.empty();
    if (found) return p.data();
    while (pack_bytes + size * 4 > kPackBytes && !kept.empty()) drop();
    if (!spare.empty()) {
      p = std::move(spare.back());
      spare.pop_back();
    }
    p.resize(size);
    kept.push_back(number);
    pack_bytes += size * 4;
    return p.data();
  }

 private:
  void drop() {
    std::vector<float>& p = packs[kept.front()];
    kept.pop_front();
    pack_bytes -= static_cast<int64_t>(p.size()) * 4;
    if (spare.size() < 64) spare.push_back(std::move(p));
    p = {};
  }
};

struct Core::Call {
  const Instruction* in = nullptr;
  Lane* lane = nullptr;            // the thread's, when it runs alone
  Registers* registers = nullptr;  // of the engines
  int64_t partition = 0;           // first partition of the on-chip operands
  std::array<View, 6> v;
};

struct Semantics {
  using Call = Core::Call;
  using Body = void (*)(Core&, const Call&, int64_t, int64_t);  // rows [begin, end) of the first operand

  static bool has(const Call& c, int i) { return c.in->operands[i].kind != Operand::Kind::none; }
  static bool tile(const Call& c, int i) { return c.in->operands[i].is_tile(); }
  static float number(const Call& c, int i, int64_t row, float otherwise = 0) {
    const Operand& o = c.in->operands[i];
    if (o.kind == Operand::Kind::immediate) return static_cast<float>(o.immediate);
    if (!o.is_tile()) return otherwise;
    float buffer;
    return *load(c.v[i], row, 0, 1, &buffer);
  }

  // out = x op s (reverse: s op x) for a number s
  static void apply(AluOp op, bool reverse, const float* x, float s, float* out, int64_t n) {
    const auto f = K().binary[static_cast<int>(op)];
    if (reverse && info(op).inputs == 2)
      f(&s, 0, x, 1, out, n);
    else
      f(x, 1, &s, 0, out, n);
  }
  static void apply(AluOp op, bool reverse, const float* x, const float* y, float* out, int64_t n) {
    const auto f = K().binary[static_cast<int>(op)];
    if (reverse && info(op).inputs == 2)
      f(y, 1, x, 1, out, n);
    else
      f(x, 1, y, 1, out, n);
  }
  static float fold(AluOp op, float a, float b) {
    float out;
    K().binary[static_cast<int>(op)](&a, 1, &b, 1, &out, 1);
    return out;
  }

  // f(the operator as a function object) if it is one that loops over single elements should not call through a table.
  template <class F>
  static bool inlined(AluOp op, F&& f) {
    if (op == AluOp::add) return f(std::plus<float>()), true;
    if (op == AluOp::subtract) return f(std::minus<float>()), true;
    if (op == AluOp::multiply) return f(std::multiplies<float>()), true;
    return false;
  }

  // Runs body(n, row, at) chunk by chunk over the rows of the result.
  template <class F>
  static void chunks(const View& dst, int64_t begin, int64_t end, F&& body) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < dst.free; i += kChunk) body(r, i, std::min(kChunk, dst.free - i));
  }

  static void dma_copy(Core& core, const Call& c, int64_t begin, int64_t end) {
    const Access &ta = c.in->operand(0).access, &fa = c.in->operand(1).access;
    const View &to = c.v[0], &from = c.v[1];
    if (!ta.is_dynamic() && !fa.is_dynamic()) {
      if (to.rows == from.rows)
        for (int64_t r = begin; r < end; ++r) copy_row(to, r, from, r);
      else
        copy_row(flatten(to), 0, flatten(from), 0);
      return;
    }
    dynamic_copy(core, c);
  }

  // Byte offsets of an access's rows; nothing for rows outside the buffer (oob skip).
  static std::vector<std::optional<int64_t>> rows_of(Core& core, const Call& c, int operand) {
    const Access& a = c.in->operand(operand).access;
    const Storage& s = core.program_.storages()[a.storage];
    const View& v = c.v[operand];
    const int64_t item = size_of(a.dtype);
    std::vector<std::optional<int64_t>> out;
    std::vector<int32_t> index;
    if (a.indexing == Access::Indexing::rows) {
      Operand o;
      o.kind = Operand::Kind::tile;
      o.access = *a.index;
      const View iv = core.view(o);
      std::vector<int32_t> row(iv.free);
      index.resize(iv.rows * iv.free);
      for (int64_t p = 0; p < iv.rows; ++p) {
        load_int(iv, p, 0, iv.free, row.data());
        for (int64_t j = 0; j < iv.free; ++j) index[j * iv.rows + p] = row[j];
      }
    }
    // Extent of one row, to check that it stays inside the buffer.
    int64_t low = 0, high = 0;
    for (int i = 0; i < v.ndim; ++i) {
      const int64_t span = v.dims[i].stride * (v.dims[i].size - 1);
      (span < 0 ? low : high) += span;
    }
    const bool chip = on_chip(s.memory), reaches = core.reaches(a);
    const int64_t total = chip ? INT64_MAX : s.row_bytes;
    const char* origin = core.buffers_[a.storage].base;
    for (int64_t r = 0; r < v.rows; ++r) {
      int64_t at = (v.base - origin) + r * v.pitch;
      bool inside = reaches;
      if (!index.empty()) {
        const int64_t i = index[r];
        inside = inside && i >= 0 && (a.index_limit == 0 || i < a.index_limit);
        at = (v.base - origin) + i * a.index_stride * item;
      }
      if (!chip) inside = inside && at + low >= 0 && at + high + item <= total;
      if (chip && a.reg >= 0) {
        const int64_t pitch = core.buffers_[a.storage].pitch;
        const int64_t column = at % pitch;
        inside =
            inside && at >= 0 && column + low >= 0 && column + high + item <= s.row_bytes && at / pitch < s.partitions;
      }
      if (!inside && c.in->oob_mode == OobMode::error) {
        std::ostringstream message;
        message << "is out of bounds: ";
        if (reaches)
          message << "row " << r << " starts at byte " << at << " of " << s.name << " with " << s.row_bytes << " bytes";
        else
          message << core.beyond(a);
        throw OutOfBounds(c.in->spec().name, c.in->spec().operands[operand].name, message.str(), c.in->source);
      }
      out.push_back(inside ? std::optional(at) : std::nullopt);
    }
    return out;
  }

  static void dynamic_copy(Core& core, const Call& c) {
    View to = c.v[0], from = c.v[1];
    auto to_rows = rows_of(core, c, 0), from_rows = rows_of(core, c, 1);
    char* to_origin = core.buffers_[c.in->operand(0).access.storage].base;
    char* from_origin = core.buffers_[c.in->operand(1).access.storage].base;
    if (to.rows == from.rows && !(c.in->stage >> 1 & 1)) {
      for (int64_t r = 0; r < to.rows; ++r) {
        if (!to_rows[r] || !from_rows[r]) continue;
        to.base = to_origin + *to_rows[r];
        from.base = from_origin + *from_rows[r];
        copy_row(to, 0, from, 0);
      }
      return;
    }
    // Rows divide differently, or the two sides overlap: through contiguous memory.
    Staged stage(from);
    std::vector<char> valid(stage.view.rows * stage.view.free, 1);
    for (int64_t r = 0; r < from.rows; ++r) {
      if (!from_rows[r]) {
        std::fill_n(valid.begin() + r * from.free, from.free, 0);
        continue;
      }
      from.base = from_origin + *from_rows[r];
      copy_row(stage.view, r, from, 0);
    }
    View linear = flatten(stage.view);
    for (int64_t r = 0; r < to.rows; ++r) {
      if (!to_rows[r]) continue;
      if (!std::all_of(valid.begin() + r * to.free, valid.begin() + (r + 1) * to.free, [](char x) { return x; }))
        continue;
      to.base = to_origin + *to_rows[r];
      View part = linear;
      part.base = linear.base + r * to.free * size_of(from.dtype);
      part.free = to.free;
      part.ndim = to.free > 1;
      part.dims[0] = {size_of(from.dtype), to.free};
      copy_row(to, 0, part, 0);
    }
  }

  static void dma_compute(Core& core, const Call& c, int64_t, int64_t) {
    // dst row by row, so that an indirect dst sees the sums of earlier rows with its index.
    View to = c.v[0];
    auto to_rows = rows_of(core, c, 0);
    char* to_origin = core.buffers_[c.in->operand(0).access.storage].base;
    struct Source {
      View v;
      std::vector<std::optional<int64_t>> rows;
      char* origin;
    };
    std::vector<Source> sources;
    std::vector<std::unique_ptr<Staged>> staged;
    for (int i = 1; i < 3; ++i) {
      if (!has(c, i)) continue;
      const Access& a = c.in->operand(i).access;
      const bool overlaps = c.in->stage >> i & 1 && !a.is_dynamic() && !c.in->operand(0).access.index;
      if (c.v[i].rows == to.rows && !overlaps) {
        sources.push_back({c.v[i], rows_of(core, c, i), core.buffers_[a.storage].base});
        continue;
      }
      View divided = to;  // the same elements in dst's rows
      divided.dtype = a.dtype;
      const View& v = staged.emplace_back(std::make_unique<Staged>(divided))->view;
      copy_view(v, c.v[i]);
      std::vector<std::optional<int64_t>> rows;
      for (int64_t r = 0; r < v.rows; ++r) rows.emplace_back(r * v.pitch);
      sources.push_back({v, std::move(rows), v.base});
    }
    std::vector<float> sum(to.free), term(to.free);
    for (int64_t r = 0; r < to.rows; ++r) {
      bool inside = to_rows[r].has_value();
      for (Source& s : sources) inside = inside && s.rows[r].has_value();
      if (!inside) continue;
      std::fill(sum.begin(), sum.end(), 0.0f);
      bool first = true;
      for (Source& s : sources) {
        s.v.base = s.origin + *s.rows[r];
        const float* x = load(s.v, 0, 0, to.free, term.data());
        for (int64_t i = 0; i < to.free; ++i) sum[i] = first ? x[i] : sum[i] + x[i];
        first = false;
      }
      to.base = to_origin + *to_rows[r];
      store(to, 0, 0, to.free, sum.data());
    }
  }

  static void dma_transpose(Core& core, const Call& c, int64_t, int64_t) {
    // list: for each axis of dst the axis of src. src's rows may be gathered first.
    const Access& a = c.in->operand(1).access;
    const int64_t item = size_of(a.dtype);
    View from = c.v[1];
    Staged stage(from);
    auto rows = rows_of(core, c, 1);
    char* origin = core.buffers_[a.storage].base;
    for (int64_t r = 0; r < from.rows; ++r) {
      if (!rows[r]) continue;
      from.base = origin + *rows[r];
      copy_row(stage.view, r, from, 0);
    }
    std::array<int64_t, kMaxDims> strides{};
    int64_t step = 1;
    for (int i = a.ndim - 1; i >= 0; --i) strides[i] = step, step *= a.dims[i].size;
    View permuted;
    permuted.base = stage.view.base;
    permuted.dtype = a.dtype;
    std::array<Dim, kMaxDims> dims{};
    for (int i = 0; i < a.ndim; ++i) dims[i] = {strides[c.in->list[i]], a.dims[c.in->list[i]].size};
    permuted.rows = dims[0].size;
    permuted.pitch = dims[0].stride * item;
    merge(permuted, dims.data() + 1, a.ndim - 1);
    copy_view(c.v[0], permuted);
  }

  static void tensor_copy(Core&, const Call& c, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) copy_row(c.v[0], r, c.v[1], r);
  }

  static void memset(Core&, const Call& c, int64_t begin, int64_t end) {
    const View& dst = c.v[0];
    const int64_t item = size_of(dst.dtype);
    char bytes[4] = {};
    if (is_integer(dst.dtype)) {
      const int64_t v = static_cast<int64_t>(c.in->value);
      std::memcpy(bytes, &v, item);  // little-endian
    } else if (!is_packed(dst.dtype)) {
      const float v = static_cast<float>(c.in->value);
      K().store[static_cast<int>(dst.dtype)](&v, 1, bytes, item);
    }
    for (int64_t r = begin; r < end; ++r)
      for_runs(dst, r, 0, dst.free, [&](char* p, int64_t stride, int64_t n) {
        if (item == 4 && stride == 4) {
          uint32_t w;
          std::memcpy(&w, bytes, 4);
          std::fill_n(reinterpret_cast<uint32_t*>(p), n, w);
        } else {
          for (int64_t i = 0; i < n; ++i) std::memcpy(p + i * stride, bytes, item);
        }
      });
  }

  static void tensor_copy_predicated(Core&, const Call& c, int64_t begin, int64_t end) {
    const View &dst = c.v[0], &predicate = c.v[2];
    const int64_t item = size_of(dst.dtype);
    std::vector<int32_t> take(dst.free);
    std::vector<char> row(dst.free * item);
    for (int64_t r = begin; r < end; ++r) {
      load_int(predicate, r, 0, dst.free, take.data());
      View temporary = dst;
      temporary.base = row.data();
      temporary.pitch = 0;
      temporary.ndim = dst.free > 1;
      temporary.dims[0] = {item, dst.free};
      temporary.contiguous = true;
      if (tile(c, 1)) {
        copy_row(temporary, 0, c.v[1], r);
      } else {
        std::vector<float> value(dst.free, number(c, 1, r));
        store(temporary, 0, 0, dst.free, value.data());
      }
      int64_t i = 0;
      for_runs(dst, r, 0, dst.free, [&](char* p, int64_t stride, int64_t n) {
        for (int64_t k = 0; k < n; ++k, ++i)
          if ((take[i] != 0) != c.in->reverse0) std::memcpy(p + k * stride, row.data() + i * item, item);
      });
    }
  }

  static void matmul(Core& core, const Call& c, int64_t, int64_t) {
    const View &stationary = c.v[1], &moving = c.v[2];
    if (c.in->transpose) return matmul_transpose(c);
    const int64_t layers = c.in->perf_mode == PerfMode::double_row ? 2 : 1;
    const int64_t rows = stationary.rows, k = rows * layers, m = stationary.free / layers, n = moving.free / layers;
    auto element = [=, &stationary, &moving](bool left, int64_t i, int64_t begin, int64_t count, float* to) {
      return load(left ? stationary : moving, i % rows, (i / rows) * (left ? m : n) + begin, count, to);
    };
    auto raw = [=, &stationary, &moving](bool left, int64_t i, int64_t begin, int64_t count,
                                         uint16_t* to) -> const uint16_t* {
      const View& v = left ? stationary : moving;
      const int64_t row = i % rows, first = (i / rows) * (left ? m : n) + begin;
      if (v.contiguous) return reinterpret_cast<const uint16_t*>(v.base + row * v.pitch) + first;
      int64_t at = 0;
      for_runs(v, row, first, count, [&](const char* p, int64_t stride, int64_t run) {
        for (int64_t j = 0; j < run; ++j, ++at) std::memcpy(to + at, p + j * stride, 2);
      });
      return to;
    };
    multiply(core, c, k, m, n, element, raw);
  }

  static void matmul_transpose(const Call& c) {
    const View &dst = c.v[0], &data = c.v[1];
    const int64_t item = size_of(data.dtype), wide = size_of(dst.dtype);
    if (item == wide && dst.contiguous && data.contiguous)
      return K().transpose(data.base, data.pitch, dst.base, dst.pitch, data.rows, data.free, item);
    std::vector<char> row(data.free * item);
    View line = data;
    line.base = row.data();
    line.pitch = 0;
    line.ndim = data.free > 1;
    line.dims[0] = {item, data.free};
    line.contiguous = true;
    for (int64_t r = 0; r < data.rows; ++r) {
      copy_row(line, 0, data, r);
      for (int64_t m = 0; m < data.free; ++m)
        for_runs(dst, m, r, 1, [&](char* p, int64_t, int64_t) {
          std::memset(p, 0, wide);
          std::memcpy(p, row.data() + m * item, item);
        });
    }
  }

  // dst (+)= left^T right; element(left?, k, begin, count, scratch) gives rows of the factors in fp32. raw: the same as
  // the factors have them in memory; null: they have no rows of bfloat16.
  template <class F, class G = std::nullptr_t>
  static void multiply(Core& core, const Call& c, int64_t k, int64_t m, int64_t n, F&& element, G&& raw = nullptr) {
    const View& dst = c.v[0];
    const Access& a = c.in->operand(0).access;
    const Kernels& kernels = K();
    Accumulate mode = c.in->accumulate;
    const InitMap* map = nullptr;
    if (mode == Accumulate::automatic) {
      map = &core.runtime_maps_[a.storage];
      const auto state = map->query(core.program_.storages()[a.storage], core.placed(a));
      mode = state == InitMap::State::none  ? Accumulate::overwrite
             : state == InitMap::State::all ? Accumulate::add
                                            : Accumulate::automatic;
    }
    const bool direct = dst.contiguous && dst.dtype == Dtype::float32 && mode != Accumulate::automatic;
    const int64_t panels = (n + kernels.tile_n - 1) / kernels.tile_n;
    const bool alike = c.v[1].dtype == c.v[2].dtype;  // packed the same way wherever a factor occurs
    const bool pairs =
        !std::is_null_pointer_v<std::decay_t<G>> && kernels.gemm_bf16 && alike && c.v[1].dtype == Dtype::bfloat16;
    const int64_t depth = pairs ? (k + 1) / 2 : k;
    auto pack = [&](bool left, int64_t begin, int64_t count, int64_t tile, float* to) {
      const int64_t groups = (count + tile - 1) / tile;
      if constexpr (!std::is_null_pointer_v<std::decay_t<G>>)
        if (pairs) {
          auto* lines = reinterpret_cast<uint16_t*>(scratch(2, count + 1));
          auto* pair = reinterpret_cast<uint32_t*>(to);
          for (int64_t i = 0; i < depth; ++i) {
            const uint16_t* low = raw(left, 2 * i, begin, count, lines);
            uint16_t* second = lines + count;
            if (2 * i + 1 == k) std::fill(second, second + count, 0);
            const uint16_t* high = 2 * i + 1 < k ? raw(left, 2 * i + 1, begin, count, second) : second;
            for (int64_t g = 0; g < groups; ++g) {
              uint32_t* at = pair + (g * depth + i) * tile;
              const int64_t first = g * tile, part = std::min(tile, count - first);
              for (int64_t j = 0; j < part; ++j) at[j] = low[first + j] | static_cast<uint32_t>(high[first + j]) << 16;
              std::fill(at + part, at + tile, 0);
            }
          }
          return;
        }
      float* line = scratch(2, count);
      for (int64_t i = 0; i < k; ++i) {
        const float* x = element(left, i, begin, count, line);
        for (int64_t g = 0; g < groups; ++g) {
          float* at = to + (g * k + i) * tile;
          const int64_t part = std::min(tile, count - g * tile);
          std::memcpy(at, x + g * tile, part * sizeof(float));
          std::fill(at + part, at + tile, 0.0f);
        }
      }
    };
    auto packed = [&](bool left, int64_t begin, int64_t count, int64_t tile) -> const float* {
      const int64_t size = (count + tile - 1) / tile * tile * depth;
      const int32_t number = c.lane && alike ? c.in->pack[!left] : -1;
      bool found = false;
      float* to = number < 0 ? scratch(left ? 3 : 4, size) : c.lane->pack(number, size, found);
      if (!found) pack(left, begin, count, tile, to);
      return to;
    };
    auto product = [&](const float* left, const float* right, int64_t count, float* to, int64_t pitch, bool add) {
      if (pairs)
        kernels.gemm_bf16(reinterpret_cast<const uint32_t*>(left), reinterpret_cast<const uint32_t*>(right), depth, m,
                          count, to, pitch, add);
      else
        kernels.gemm(left, right, k, m, count, to, pitch, add);
    };
    auto columns = [&](int64_t first_panel, int64_t last_panel) {
      const int64_t begin = first_panel * kernels.tile_n, count = std::min(n, last_panel * kernels.tile_n) - begin;
      const float* left = packed(true, 0, m, kernels.tile_m);
      const float* right = packed(false, begin, count, kernels.tile_n);
      if (direct) {
        product(left, right, count, reinterpret_cast<float*>(dst.base) + begin, dst.pitch / 4, mode == Accumulate::add);
        return;
      }
      float* sum = scratch(5, m * count);
      product(left, right, count, sum, count, false);
      float* old = scratch(6, count);
      for (int64_t r = 0; r < m; ++r) {
        float* row = sum + r * count;
        if (mode != Accumulate::overwrite) {
          const float* before = load(dst, r, begin, count, old);
          for (int64_t i = 0; i < count; ++i) {
            bool add = mode == Accumulate::add;
            if (map && !add)
              for_runs(dst, r, begin + i, 1, [&](char* p, int64_t, int64_t) {
                const Buffer& b = core.buffers_[a.storage];
                const int64_t at = p - b.base;
                add = map->written(at / b.pitch * core.program_.storages()[a.storage].row_bytes + at % b.pitch);
              });
            row[i] = add ? before[i] + row[i] : row[i];
          }
        }
        store(dst, r, begin, count, row);
      }
    };
    if (c.lane || m * n * k < 1 << 18)
      columns(0, panels);
    else
      parallel_for()(panels, columns);
  }

  // The value of a 4-bit float: sign, 2 bits exponent (bias 1), 1 bit mantissa.
  static float fp4(uint32_t nibble) {
    static constexpr float magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
  }

  static void matmul_mx(Core& core, const Call& c, int64_t, int64_t) {
    const View *factors[2] = {&c.v[2], &c.v[1]}, *scales[2] = {&c.v[4], &c.v[3]};
    const int64_t rows = c.v[1].rows, k = rows * 4, m = c.v[1].free, n = c.v[2].free;
    multiply(core, c, k, m, n, [=](bool left, int64_t i, int64_t begin, int64_t count, float* to) -> const float* {
      const View &v = *factors[left], &scale = *scales[left];
      const int64_t p = i / 4, lane = i % 4, group = p / 8;
      const Dtype t = info(v.dtype).lane;
      const int64_t item = size_of(v.dtype);
      int64_t at = 0;
      for_runs(v, p, begin, count, [&](char* q, int64_t stride, int64_t run) {
        for (int64_t j = 0; j < run; ++j, ++at) {
          const char* x4 = q + j * stride;
          if (item == 4) {
            K().load[static_cast<int>(t)](x4 + lane, 1, 1, to + at);
          } else {
            const auto byte = static_cast<uint8_t>(x4[lane / 2]);
            to[at] = fp4(lane % 2 ? byte >> 4 : byte & 15);
          }
        }
      });
      at = 0;
      for_runs(scale, scale_row(rows, group), begin, count, [&](char* q, int64_t stride, int64_t run) {
        for (int64_t j = 0; j < run; ++j, ++at) {
          const auto e = static_cast<uint8_t>(q[j * stride]);
          to[at] = e == 255 ? NAN : std::ldexp(to[at], e - 127);
        }
      });
      return to;
    });
  }

  static void transpose(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &data = c.v[1];
    const int64_t item = size_of(data.dtype);
    if (dst.contiguous && data.contiguous)
      return K().transpose(data.base, data.pitch, dst.base, dst.pitch, data.rows, data.free, item);
    for (int64_t r = 0; r < data.rows; ++r) {
      int64_t m = 0;
      for_runs(data, r, 0, data.free, [&](char* q, int64_t stride, int64_t n) {
        for (int64_t i = 0; i < n; ++i, ++m)
          for_runs(dst, m, r, 1, [&](char* p, int64_t, int64_t) { std::memcpy(p, q + i * stride, item); });
      });
    }
  }

  static bool exact_integer(const Call& c) {
    if (info(c.in->op0).cls == AluClass::bitwise) return true;
    if (c.in->engine != Engine::gpsimd) return false;
    for (size_t i = 0; i < c.in->operands.size(); ++i)
      if (tile(c, i) && !is_32bit_integer(c.v[i].dtype)) return false;
    return K().binary_int[static_cast<int>(c.in->op0)] != nullptr;
  }

  static Kernels::BinaryInt int_op(AluOp op, Dtype t) {
    return (t == Dtype::uint32 ? K().binary_uint : K().binary_int)[static_cast<int>(op)];
  }

  static void tensor_tensor(Core&, const Call& call, int64_t begin, int64_t end) {
    Call c = call;
    if (c.v[0].free == 1 && end - begin > 1) {
      for (int i = 0; i < 3; ++i) c.v[i] = turned(call.v[i], begin, end - begin);
      begin = 0, end = 1;
    }
    if (exact_integer(c)) {
      const bool bits = info(c.in->op0).cls == AluClass::bitwise;
      auto *x = reinterpret_cast<int32_t*>(scratch(0, kChunk)), *y = reinterpret_cast<int32_t*>(scratch(1, kChunk));
      chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
        load_int(c.v[1], r, i, n, x, bits);
        load_int(c.v[2], r, i, n, y, bits);
        int_op(c.in->op0, c.v[1].dtype)(x, 1, y, 1, x, n);
        store_int(c.v[0], r, i, n, x);
      });
      return;
    }
    float *x = scratch(0, kChunk), *y = scratch(1, kChunk), *z = scratch(2, kChunk);
    chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
      float* out = target(c.v[0], r, i, z);
      apply(c.in->op0, false, load(c.v[1], r, i, n, x), load(c.v[2], r, i, n, y), out, n);
      store(c.v[0], r, i, n, out);
    });
  }

  static void tensor_scalar(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const bool second = in.op1 != AluOp::bypass && (has(c, 3) || info(in.op1).inputs == 1);
    if (info(in.op0).cls == AluClass::bitwise || info(in.op1).cls == AluClass::bitwise) {
      auto* x = reinterpret_cast<int32_t*>(scratch(0, kChunk));
      auto value = [&](int i, int64_t r) {
        if (tile(c, i)) {
          int32_t v;
          return *load_int(c.v[i], r, 0, 1, &v, true);
        }
        return static_cast<int32_t>(static_cast<int64_t>(in.operands[i].immediate));
      };
      auto step = [&](AluOp op, bool reverse, int32_t s, int64_t n) {
        if (op == AluOp::bypass) return;
        const auto f = int_op(op, Dtype::uint32);
        if (reverse)
          f(&s, 0, x, 1, x, n);
        else
          f(x, 1, &s, 0, x, n);
      };
      chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
        load_int(c.v[1], r, i, n, x, true);
        step(in.op0, in.reverse0, value(2, r), n);
        if (second) step(in.op1, in.reverse1, has(c, 3) ? value(3, r) : 0, n);
        store_int(c.v[0], r, i, n, x);
      });
      return;
    }
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    if (c.v[0].free == 1 && end - begin > 1) {  // one element per partition: the partitions are the vector
      const int64_t n = end - begin;
      const View dst = turned(c.v[0], begin, n), data = turned(c.v[1], begin, n);
      float* out = target(dst, 0, 0, z);
      const float* v = load(data, 0, 0, n, x);
      auto step = [&](int i, AluOp op, bool reverse, const float* from) {
        if (!tile(c, i)) return apply(op, reverse, from, number(c, i, 0), out, n);
        apply(op, reverse, from, load(turned(c.v[i], begin, n), 0, 0, n, scratch(2, kChunk)), out, n);
      };
      step(2, in.op0, in.reverse0, v);
      if (second) step(3, in.op1, in.reverse1, out);
      store(dst, 0, 0, n, out);
      return;
    }
    chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
      float* out = target(c.v[0], r, i, z);
      apply(in.op0, in.reverse0, load(c.v[1], r, i, n, x), number(c, 2, r), out, n);
      if (second) apply(in.op1, in.reverse1, out, number(c, 3, r), out, n);
      store(c.v[0], r, i, n, out);
    });
  }

  static void scalar_tensor_tensor(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    float *x = scratch(0, kChunk), *y = scratch(1, kChunk), *z = scratch(2, kChunk);
    chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
      apply(in.op0, in.reverse0, load(c.v[1], r, i, n, x), number(c, 2, r), z, n);
      const float* second = load(c.v[3], r, i, n, y);
      float* out = target(c.v[0], r, i, z);
      apply(in.op1, in.reverse1, z, second, out, n);
      store(c.v[0], r, i, n, out);
    });
  }

  static void tensor_reduce(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View &dst = c.v[0], &data = c.v[1];
    const int64_t run = in.count;
    if (info(in.op0).cls == AluClass::bitwise) {
      std::vector<int32_t> row(data.free), out(dst.free);
      for (int64_t r = begin; r < end; ++r) {
        load_int(data, r, 0, data.free, row.data(), true);
        for (int64_t j = 0; j < dst.free; ++j) {
          int32_t acc = static_cast<int32_t>(info(in.op0).identity);
          for (int64_t i = 0; i < run; ++i) int_op(in.op0, Dtype::uint32)(&acc, 1, &row[j * run + i], 1, &acc, 1);
          out[j] = acc;
        }
        store_int(dst, r, 0, dst.free, out.data());
      }
      return;
    }
    const auto reduce = K().reduce[static_cast<int>(in.op0)];
    float *row = scratch(0, data.free), *out = scratch(1, dst.free);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = load(data, r, 0, data.free, row);
      for (int64_t j = 0; j < dst.free; ++j) {
        float v = reduce(x + j * run, run);
        if (in.op0 == AluOp::average) v /= static_cast<float>(run);
        out[j] = in.negate ? -v : v;
      }
      store(dst, r, 0, dst.free, out);
    }
  }

  static void partition_reduce(Core&, const Call& c, int64_t, int64_t) {
    const Instruction& in = *c.in;
    const View &dst = c.v[0], &data = c.v[1];
    const int64_t n = data.free;
    if (info(in.op0).cls == AluClass::bitwise) {
      std::vector<int32_t> acc(n, static_cast<int32_t>(info(in.op0).identity)), row(n);
      for (int64_t r = 0; r < data.rows; ++r) {
        load_int(data, r, 0, n, row.data(), true);
        int_op(in.op0, Dtype::uint32)(acc.data(), 1, row.data(), 1, acc.data(), n);
      }
      store_int(dst, 0, 0, n, acc.data());
      return;
    }
    std::vector<float> acc(n, static_cast<float>(info(in.op0).identity));
    float* row = scratch(0, n);
    for (int64_t r = 0; r < data.rows; ++r)
      K().binary[static_cast<int>(in.op0)](acc.data(), 1, load(data, r, 0, n, row), 1, acc.data(), n);
    if (in.op0 == AluOp::average)
      for (float& v : acc) v /= static_cast<float>(data.rows);
    store(dst, 0, 0, n, acc.data());
  }

  // The accumulation register of a partition before and after an instruction's elements.
  struct Accumulator {
    float& reg;
    const Instruction& in;
    AluOp op;
    bool active;
    Accumulator(float& r, const Instruction& i, AluOp o, float init) : reg(r), in(i), op(o) {
      using R = ReduceCmd;
      active = i.reduce_cmd == R::reduce || i.reduce_cmd == R::reset_reduce || i.reduce_cmd == R::load_reduce;
      if (i.reduce_cmd == R::reset || i.reduce_cmd == R::reset_reduce) reg = static_cast<float>(info(op).identity);
      if (i.reduce_cmd == R::load_reduce) reg = init;
    }
    void add(const float* x, int64_t n) {
      if (active) reg = fold(op, reg, K().reduce[static_cast<int>(op)](x, n));
    }
  };

  static void write_register(const Call& c, int operand, int64_t row, float value) {
    if (!tile(c, operand)) return;
    store(c.v[operand], row, 0, 1, &value);
  }

  static void tensor_scalar_reduce(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->vector[dst.partition + r], in, in.reduce_op, number(c, 4, r));
      const float s = number(c, 2, r);
      for (int64_t i = 0; i < dst.free; i += kChunk) {
        const int64_t n = std::min(kChunk, dst.free - i);
        apply(in.op0, in.reverse0, load(c.v[1], r, i, n, x), s, z, n);
        acc.add(z, n);
        store(dst, r, i, n, z);
      }
      write_register(c, 3, r, in.negate ? -acc.reg : acc.reg);
    }
  }

  static void tensor_scalar_cumulative(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    float *x = scratch(0, dst.free), *z = scratch(1, dst.free);
    for (int64_t r = begin; r < end; ++r) {
      float& reg = c.registers->vector[dst.partition + r];
      if (in.reduce_cmd == ReduceCmd::reset_reduce || in.reduce_cmd == ReduceCmd::reset)
        reg = static_cast<float>(info(in.op1).identity);
      if (in.reduce_cmd == ReduceCmd::load_reduce) reg = number(c, 3, r);
      apply(in.op0, false, load(c.v[1], r, 0, dst.free, x), number(c, 2, r), z, dst.free);
      const auto scan = [&](auto f) {
        for (int64_t i = 0; i < dst.free; ++i) z[i] = reg = f(z[i], reg);
      };
      if (!inlined(in.op1, scan)) scan([&](float a, float b) { return fold(in.op1, a, b); });
      store(dst, r, 0, dst.free, z);
    }
  }

  static void tensor_tensor_scan(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    const int64_t n = dst.free;
    float *a = scratch(0, n), *b = scratch(1, n), *z = scratch(2, n);
    for (int64_t r = begin; r < end; ++r) {
      const float *x = load(c.v[1], r, 0, n, a), *y = load(c.v[2], r, 0, n, b);
      const float initial = number(c, 3, r);
      const bool reverse0 = in.reverse0 && info(in.op0).inputs == 2, reverse1 = in.reverse1 && info(in.op1).inputs == 2;
      const auto scan = [&](auto f0, auto f1) {
        float state = initial;
        for (int64_t i = 0; i < n; ++i) {
          const float t = reverse0 ? f0(state, x[i]) : f0(x[i], state);
          z[i] = state = reverse1 ? f1(y[i], t) : f1(t, y[i]);
        }
      };
      bool done = false;
      inlined(in.op0, [&](auto f0) { done = inlined(in.op1, [&](auto f1) { scan(f0, f1); }); });
      if (!done)
        scan([&](float a, float b) { return fold(in.op0, a, b); },
             [&](float a, float b) { return fold(in.op1, a, b); });
      store(dst, r, 0, n, z);
    }
  }

  static void activation(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const auto f = K().function[static_cast<int>(in.function)];
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    if (c.v[0].free == 1 && end - begin > 1 && in.reduce_cmd == ReduceCmd::idle && !tile(c, 4) && !tile(c, 3)) {
      const int64_t n = end - begin;
      const View dst = turned(c.v[0], begin, n);
      const float* v = load(turned(c.v[1], begin, n), 0, 0, n, x);
      const float scale = number(c, 3, 0, 1.0f);
      float* y = scratch(2, kChunk);
      const float constant = tile(c, 2) ? 0.0f : number(c, 2, 0);
      const float* bias = tile(c, 2) ? load(turned(c.v[2], begin, n), 0, 0, n, y) : &constant;
      // As below: what is neither scaled nor shifted keeps its bits, the sign of 0 too.
      for (int64_t i = 0; i < n; ++i) {
        const float b = bias[tile(c, 2) ? i : 0], scaled = scale == 1.0f ? v[i] : v[i] * scale;
        z[i] = scale == 1.0f && b == 0.0f ? scaled : scaled + b;
      }
      f(z, static_cast<float>(in.value), z, n);
      store(dst, 0, 0, n, z);
      return;
    }
    const View& dst = c.v[0];
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->scalar[dst.partition + r], in, in.reduce_op, 0);
      const float bias = number(c, 2, r), scale = number(c, 3, r, 1.0f);
      for (int64_t i = 0; i < dst.free; i += kChunk) {
        const int64_t n = std::min(kChunk, dst.free - i);
        float* out = target(dst, r, i, z);
        const float* v = load(c.v[1], r, i, n, x);
        activate(in.function, v, scale, bias, static_cast<float>(in.value), out, n);
        acc.add(out, n);
        store(dst, r, i, n, out);
      }
      write_register(c, 4, r, acc.reg);
    }
  }

  static void activate2(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->scalar[dst.partition + r], in, in.reduce_op, 0);
      for (int64_t i = 0; i < dst.free; i += kChunk) {
        const int64_t n = std::min(kChunk, dst.free - i);
        apply(in.op0, in.reverse0, load(c.v[1], r, i, n, x), number(c, 2, r), z, n);
        apply(in.op1, in.reverse1, z, number(c, 3, r), z, n);
        K().function[static_cast<int>(in.function)](z, number(c, 4, r), z, n);
        acc.add(z, n);
        store(dst, r, i, n, z);
      }
      write_register(c, 5, r, acc.reg);
    }
  }

  static void exponential(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->vector[dst.partition + r], in, AluOp::add, number(c, 4, r));
      const float shift = number(c, 2, r);
      for (int64_t i = 0; i < dst.free; i += kChunk) {
        const int64_t n = std::min(kChunk, dst.free - i);
        apply(AluOp::subtract, false, load(c.v[1], r, i, n, x), shift, z, n);
        K().function[static_cast<int>(Function::exp)](z, 0, z, n);
        acc.add(z, n);
        store(dst, r, i, n, z);
      }
      write_register(c, 3, r, acc.reg);
    }
  }

  static void reciprocal(Core&, const Call& call, int64_t begin, int64_t end) {
    Call c = call;
    if (c.v[0].free == 1 && end - begin > 1) {
      for (int i = 0; i < 2; ++i) c.v[i] = turned(call.v[i], begin, end - begin);
      begin = 0, end = 1;
    }
    float *x = scratch(0, kChunk), *z = scratch(1, kChunk);
    chunks(c.v[0], begin, end, [&](int64_t r, int64_t i, int64_t n) {
      float* out = target(c.v[0], r, i, z);
      K().function[static_cast<int>(Function::reciprocal)](load(c.v[1], r, i, n, x), 0, out, n);
      store(c.v[0], r, i, n, out);
    });
  }

  static void select_reduce(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    std::vector<int32_t> take(dst.free);
    float *x = scratch(0, dst.free), *z = scratch(1, dst.free);
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->vector[dst.partition + r], in, in.reduce_op, 0);
      load_int(c.v[1], r, 0, dst.free, take.data());
      const float* v = load(c.v[2], r, 0, dst.free, x);
      const float otherwise = number(c, 3, r);
      for (int64_t i = 0; i < dst.free; ++i) z[i] = (take[i] != 0) != in.reverse0 ? v[i] : otherwise;
      acc.add(z, dst.free);
      store(dst, r, 0, dst.free, z);
      write_register(c, 4, r, acc.reg);
    }
  }

  static void range_select(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    const int64_t n = dst.free;
    float *x = scratch(0, n), *z = scratch(1, n), *index = scratch(2, n), *keep = scratch(3, n), *both = scratch(4, n);
    for (int64_t i = 0; i < n; ++i) index[i] = static_cast<float>(in.offset + i);
    for (int64_t r = begin; r < end; ++r) {
      Accumulator acc(c.registers->vector[dst.partition + r], in, in.reduce_op, 0);
      const float* v = load(c.v[1], r, 0, n, x);
      apply(in.op0, false, index, number(c, 2, r), keep, n);
      apply(in.op1, false, index, number(c, 3, r), both, n);
      for (int64_t i = 0; i < n; ++i) z[i] = keep[i] != 0 && both[i] != 0 ? v[i] : static_cast<float>(in.value);
      acc.add(z, n);
      store(dst, r, 0, n, z);
      write_register(c, 4, r, acc.reg);
    }
  }

  // offset + sum of index * step over a pattern of (step, count) pairs, the last pair innermost.
  static void affine_values(const Instruction& in, int64_t base, int64_t n, int32_t* out) {
    const auto& l = in.list;
    const int dims = static_cast<int>(l.size() / 2);
    std::array<int64_t, 8> at{};
    int64_t v = base;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<int32_t>(v);
      for (int d = dims - 1; d >= 0; --d) {
        v += l[2 * d];
        if (++at[d] < l[2 * d + 1]) break;
        v -= l[2 * d] * l[2 * d + 1];
        at[d] = 0;
      }
    }
  }

  static void iota(Core&, const Call& c, int64_t begin, int64_t end) {
    const View& dst = c.v[0];
    std::vector<int32_t> values(dst.free);
    float* z = scratch(0, dst.free);
    for (int64_t r = begin; r < end; ++r) {
      affine_values(*c.in, c.in->offset + r * c.in->channel_multiplier, dst.free, values.data());
      if (is_integer(dst.dtype)) {
        store_int(dst, r, 0, dst.free, values.data());
      } else {
        std::copy(values.begin(), values.end(), z);
        store(dst, r, 0, dst.free, z);
      }
    }
  }

  static void affine_select(Core&, const Call& c, int64_t begin, int64_t end) {
    const Instruction& in = *c.in;
    const View& dst = c.v[0];
    const int64_t n = dst.free;
    std::vector<int32_t> values(n);
    const int32_t zero = 0;
    for (int64_t r = begin; r < end; ++r) {
      affine_values(in, in.offset + r * in.channel_multiplier, n, values.data());
      int_op(in.op0, Dtype::int32)(values.data(), 1, &zero, 0, values.data(), n);
      copy_row(dst, r, c.v[1], r);
      replace(dst, r, values, static_cast<float>(in.value));
    }
  }

  // Elements of a row that are not kept become `value`; the others are not touched.
  static void replace(const View& v, int64_t row, const std::vector<int32_t>& keep, float value) {
    char bytes[4];
    const int64_t item = size_of(v.dtype);
    K().store[static_cast<int>(v.dtype)](&value, 1, bytes, item);
    int64_t i = 0;
    for_runs(v, row, 0, v.free, [&](char* p, int64_t stride, int64_t n) {
      for (int64_t k = 0; k < n; ++k)
        if (!keep[i++]) std::memcpy(p + k * stride, bytes, item);
    });
  }

  // visit(i, 32 random bits of a partition); element i is drawn from state i % the number of states.
  template <class F>
  static void bits(std::vector<Core::Generator>& generators, int64_t partition, int64_t n, F&& visit) {
    Core::Generator& g = generators[partition];
    for (int64_t i = 0; i < n; ++i) visit(i, g[i % g.size()].next());
  }
  template <class F>
  static void uniform(std::vector<Core::Generator>& generators, int64_t partition, int64_t n, F&& visit) {
    bits(generators, partition, n, [&](int64_t i, uint32_t b) { visit(i, static_cast<float>(b >> 8) * 0x1p-24f); });
  }

  static void dropout(Core& core, const Call& c, int64_t begin, int64_t end) {
    const View& dst = c.v[0];
    std::vector<int32_t> keep(dst.free);
    for (int64_t r = begin; r < end; ++r) {
      const float prob = number(c, 2, r);
      uniform(core.random_[0], dst.partition + r, dst.free, [&](int64_t i, float u) { keep[i] = u >= prob; });
      copy_row(dst, r, c.v[1], r);
      replace(dst, r, keep, 0);
    }
  }

  static void bn_stats(Core&, const Call& c, int64_t begin, int64_t end) {
    const View& data = c.v[1];
    float* row = scratch(0, data.free);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = load(data, r, 0, data.free, row);
      float out[6];
      for (int parity = 0; parity < 2; ++parity) {
        const int64_t n = (data.free + 1 - parity) / 2;
        double mean = 0, m2 = 0;
        for (int64_t i = parity; i < data.free; i += 2) mean += x[i];
        mean = n ? mean / static_cast<double>(n) : 0;
        for (int64_t i = parity; i < data.free; i += 2) m2 += (x[i] - mean) * (x[i] - mean);
        out[3 * parity] = static_cast<float>(n);
        out[3 * parity + 1] = static_cast<float>(mean);
        out[3 * parity + 2] = static_cast<float>(m2);
      }
      store(c.v[0], r, 0, 6, out);
    }
  }

  static void bn_aggr(Core&, const Call& c, int64_t begin, int64_t end) {
    const View& data = c.v[1];
    float* row = scratch(0, data.free);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = load(data, r, 0, data.free, row);
      double count = 0, mean = 0, m2 = 0;
      for (int64_t i = 0; i < data.free; i += 3) {  // parallel variance: Chan, Golub, LeVeque
        const double n = x[i], total = count + n;
        if (n == 0) continue;
        const double delta = x[i + 1] - mean;
        m2 += x[i + 2] + delta * delta * count * n / total;
        mean += delta * n / total;
        count = total;
      }
      const float out[2] = {static_cast<float>(mean), static_cast<float>(count ? m2 / count : 0)};
      store(c.v[0], r, 0, 2, out);
    }
  }

  static void max8(Core&, const Call& c, int64_t begin, int64_t end) {
    const View& data = c.v[1];
    float* row = scratch(0, data.free);
    for (int64_t r = begin; r < end; ++r) {
      const float* x = load(data, r, 0, data.free, row);
      float out[8];
      std::partial_sort_copy(x, x + data.free, out, out + 8, std::greater<float>());
      store(c.v[0], r, 0, 8, out);
    }
  }

  static void find_index8(Core&, const Call& c, int64_t begin, int64_t end) {
    const View &data = c.v[1], &values = c.v[2];
    float *row = scratch(0, data.free), *wanted = scratch(1, 8);
    for (int64_t r = begin; r < end; ++r) {
      const float *x = load(data, r, 0, data.free, row), *v = load(values, r, 0, 8, wanted);
      int32_t out[8];
      for (int i = 0; i < 8; ++i) {
        // An equal value earlier in the list took an earlier index.
        int64_t from = 0;
        for (int j = 0; j < i; ++j)
          if (v[j] == v[i]) from = out[j] == -1 ? data.free : static_cast<int64_t>(static_cast<uint32_t>(out[j])) + 1;
        const auto* hit = std::find(x + std::min(from, data.free), x + data.free, v[i]);
        out[i] = hit == x + data.free ? -1 : static_cast<int32_t>(hit - x);
      }
      store_int(c.v[0], r, 0, 8, out);
    }
  }

  static void match_replace8(Core&, const Call& c, int64_t begin, int64_t end) {
    const View &data = c.v[1], &values = c.v[2];
    std::vector<float> row(data.free);
    float wanted[8];
    for (int64_t r = begin; r < end; ++r) {
      const float* x = load(data, r, 0, data.free, row.data());
      if (x != row.data()) std::copy(x, x + data.free, row.begin());
      const float* v = load(values, r, 0, 8, wanted);
      // Values pair with matches in order of position: all matches are found before anything is replaced, the last
      // value first, so that equal values get descending positions.
      int32_t out[8];
      std::vector<char> taken(data.free, 0);
      for (int i = 7; i >= 0; --i) {
        int64_t at = 0;
        while (at < data.free && (taken[at] || row[at] != v[i])) ++at;
        out[i] = at == data.free ? -1 : static_cast<int32_t>(at);
        if (at < data.free) taken[at] = 1;
      }
      for (int i = 0; i < 8; ++i)
        if (out[i] >= 0) row[out[i]] = static_cast<float>(c.in->value);
      store(c.v[0], r, 0, data.free, row.data());
      if (tile(c, 3)) store_int(c.v[3], r, 0, 8, out);
    }
  }

  static void stream_shuffle(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &src = c.v[1];
    Staged stage(src);
    copy_view(stage.view, src);
    for (int64_t r = 0; r < dst.rows; ++r) {
      const int64_t lane = c.in->list[r % 32];
      if (lane == 255) continue;
      const int64_t from = r / 32 * 32 + lane;
      copy_row(dst, r, stage.view, std::min(from, src.rows - 1));
    }
  }

  static void local_gather(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &src = c.v[1], &index = c.v[2];
    const int64_t run = std::max<int64_t>(1, c.in->count), per_row = index.free;
    const int64_t item = size_of(dst.dtype);
    std::vector<int32_t> indices(16 * per_row), row(per_row);
    for (int64_t core = 0; core < src.rows / 16; ++core) {
      for (int64_t p = 0; p < 16; ++p) {
        load_int(index, core * 16 + p, 0, per_row, row.data(), true);
        for (int64_t j = 0; j < per_row; ++j) indices[j * 16 + p] = row[j];
      }
      int64_t count = std::min<int64_t>(16 * per_row, dst.free / run);
      if (c.in->group > 0) count = std::min(count, c.in->group);
      for (int64_t p = core * 16; p < core * 16 + 16; ++p) {
        Staged line(src);
        copy_row(line.view, p, src, p);
        const char* x = line.view.row(p);
        for (int64_t i = 0; i < count; ++i)
          for (int64_t e = 0; e < run; ++e) {
            const int64_t at = static_cast<int64_t>(indices[i]) + e;
            if (at >= src.free)
              throw OutOfBounds("local_gather", "index", "is out of bounds: element " + std::to_string(at),
                                c.in->source);
            for_runs(dst, p, i * run + e, 1, [&](char* to, int64_t, int64_t) {
              if (dst.dtype == src.dtype)
                std::memcpy(to, x + at * item, item);
              else {
                float v;
                K().load[static_cast<int>(src.dtype)](x + at * size_of(src.dtype), 1, 1, &v);
                K().store[static_cast<int>(dst.dtype)](&v, 1, to, item);
              }
            });
          }
      }
    }
  }

  static void n_gather(Core&, const Call& c, int64_t begin, int64_t end) {
    const View &dst = c.v[0], &data = c.v[1];
    std::vector<int32_t> index(dst.free);
    float *x = scratch(0, data.free), *z = scratch(1, dst.free);
    for (int64_t r = begin; r < end; ++r) {
      load_int(c.v[2], r, 0, dst.free, index.data());
      for (int32_t i : index)
        if (static_cast<uint32_t>(i) >= data.free)
          throw OutOfBounds(c.in->spec().name, "indices",
                            std::to_string(static_cast<uint32_t>(i)) + " is out of bounds for " +
                                std::to_string(data.free) + " elements",
                            c.in->source);
      if (is_integer(data.dtype) && is_integer(dst.dtype)) {
        std::vector<int32_t> row(data.free), out(dst.free);
        load_int(data, r, 0, data.free, row.data());
        for (int64_t i = 0; i < dst.free; ++i) out[i] = row[index[i]];
        store_int(dst, r, 0, dst.free, out.data());
        continue;
      }
      const float* v = load(data, r, 0, data.free, x);
      for (int64_t i = 0; i < dst.free; ++i) z[i] = v[index[i]];
      store(dst, r, 0, dst.free, z);
    }
  }

  static void nonzero(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &src = c.v[1];
    float* row = scratch(0, src.free);
    std::vector<int32_t> out(dst.free);
    for (int64_t r = 0; r < src.rows; r += 16) {
      const float* x = load(src, r, 0, src.free, row);
      int32_t count = 0;
      for (int64_t i = 0; i < src.free; ++i)
        if (x[i] != 0) out[count++] = static_cast<int32_t>(i + c.in->offset);
      std::fill(out.begin() + count, out.end(), static_cast<int32_t>(c.in->value));
      out.back() = count;
      store_int(dst, r, 0, dst.free, out.data());
    }
  }

  static void sequence_bounds(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &ids = c.v[1];
    const int64_t n = ids.free;
    const auto bounds = [n](const auto* x, float* out) {
      for (int64_t i = 0; i < n;) {
        int64_t j = i;
        do ++j;
        while (j < n && x[j] == x[i]);
        for (int64_t k = i; k < j; ++k) {
          out[k] = x[i] == 0 ? static_cast<float>(n) : static_cast<float>(i);
          out[n + k] = x[i] == 0 ? -1.0f : static_cast<float>(j);
        }
        i = j;
      }
    };
    std::vector<float> out(2 * n);
    std::vector<int32_t> whole(n);
    for (int64_t r = 0; r < ids.rows; ++r) {
      if (is_integer(ids.dtype))  // ids that fp32 cannot tell apart
        bounds(load_int(ids, r, 0, n, whole.data()), out.data());
      else
        bounds(load(ids, r, 0, n, scratch(0, n)), out.data());
      store(dst, r, 0, 2 * n, out.data());
    }
  }

  static void topk(Core&, const Call& c, int64_t, int64_t) {
    // Element i of the stream is at partition i % 16, column i / 16 of a group of 16 partitions.
    const View &values = c.v[0], &indices = c.v[1], &src = c.v[2];
    const int64_t n = c.in->count;
    float* row = scratch(0, src.free);
    for (int64_t g = 0; g < src.rows; g += 16) {
      const int64_t lanes = std::min<int64_t>(16, src.rows - g);
      std::vector<float> stream(n);
      for (int64_t p = 0; p < lanes; ++p) {
        const float* x = load(src, g + p, 0, src.free, row);
        for (int64_t j = 0; j < src.free; ++j)
          if (j * lanes + p < n) stream[j * lanes + p] = x[j];
      }
      const int64_t k = std::min(n, values.free);
      std::vector<int32_t> order(n);
      for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return stream[a] > stream[b]; });
      std::reverse(order.begin(), order.begin() + k);  // ascending
      std::vector<float> largest(k);
      for (int64_t i = 0; i < k; ++i) largest[i] = stream[order[i]];
      for (int64_t r = g; r < std::min(g + lanes, values.rows); ++r) {  // each partition gets all of them
        store(values, r, 0, k, largest.data());
        store_int(indices, r, 0, k, order.data());
      }
    }
  }

  static void quantize_mx(Core&, const Call& c, int64_t, int64_t) {
    const View &dst = c.v[0], &src = c.v[1], &scale = c.v[2];
    const bool e5m2 = dst.dtype == Dtype::float8_e5m2_x4;
    const Dtype lane = e5m2 ? Dtype::float8_e5m2 : Dtype::float8_e4m3fn;
    const int max_exponent = e5m2 ? 15 : 8;
    const float largest = e5m2 ? 57344.0f : 448.0f;
    // count 1: one binade of headroom (API 0.5 on); 0: the OCP rule, which saturates.
    const int headroom = c.in->count ? 1 : 0;
    if (c.in->accumulate == Accumulate::overwrite)  // rows without a scale are 0
      for (int64_t p = 0; p < scale.rows; ++p) clear(scale, p);
    std::vector<float> x(8 * src.free);
    for (int64_t g = 0; g < src.rows / 8; ++g) {
      for (int64_t p = 0; p < 8; ++p) {
        const float* row = load(src, g * 8 + p, 0, src.free, scratch(0, src.free));
        std::copy(row, row + src.free, x.begin() + p * src.free);
      }
      const int64_t at = scale_row(std::max(scale.rows, src.rows), g);
      for (int64_t j = 0; j < src.free / 4; ++j) {
        float top = 0;
        for (int64_t p = 0; p < 8; ++p)
          for (int64_t k = 0; k < 4; ++k) top = std::max(top, std::fabs(x[p * src.free + 4 * j + k]));
        const int e = std::isinf(top) ? 127 : top > 0 ? std::ilogb(top) - (max_exponent - headroom) : -127;
        const int biased = std::clamp(e + 127, 0, 254);
        for_runs(scale, at, j, 1, [&](char* p, int64_t, int64_t) { *p = static_cast<char>(biased); });
        for (int64_t p = 0; p < 8; ++p)
          for_runs(dst, g * 8 + p, j, 1, [&](char* to, int64_t, int64_t) {
            for (int64_t k = 0; k < 4; ++k) {
              const float v = std::ldexp(x[p * src.free + 4 * j + k], 127 - biased);
              const float limited = std::clamp(v, -largest, largest);
              K().store[static_cast<int>(lane)](&limited, 1, to + k, 1);
            }
          });
      }
    }
  }

  static std::vector<Core::Generator>& generators(Core& core, const Call& c) {
    return core.random_[c.in->engine == Engine::gpsimd ? 1 : 0];
  }

  static void rng(Core& core, const Call& c, int64_t, int64_t) {
    const View& dst = c.v[0];
    std::vector<int32_t> words(dst.free);
    float* z = scratch(0, dst.free);
    for (int64_t r = 0; r < dst.rows; ++r) {
      if (is_integer(dst.dtype)) {
        bits(generators(core, c), dst.partition + r, dst.free,
             [&](int64_t i, uint32_t b) { words[i] = static_cast<int32_t>(b); });
        store_int(dst, r, 0, dst.free, words.data());
      } else {
        uniform(generators(core, c), dst.partition + r, dst.free, [&](int64_t i, float u) { z[i] = u; });
        store(dst, r, 0, dst.free, z);
      }
    }
  }

  static void rand2(Core& core, const Call& c, int64_t, int64_t) {
    const View& dst = c.v[0];
    float* z = scratch(0, dst.free);
    for (int64_t r = 0; r < dst.rows; ++r) {
      const double low = number(c, 1, r), high = number(c, 2, r);  // whose difference may be too large for fp32
      uniform(core.random_[0], dst.partition + r, dst.free,
              [&](int64_t i, float u) { z[i] = static_cast<float>(low + u * (high - low)); });
      store(dst, r, 0, dst.free, z);
    }
  }

  static void set_rng_seed(Core& core, const Call& c, int64_t, int64_t) {
    int32_t s;
    load_int(c.v[0], 0, 0, 1, &s);
    core.seed(static_cast<uint32_t>(s));
  }

  static void rand_set_state(Core& core, const Call& c, int64_t, int64_t) {
    const View& v = c.v[0];
    for (int64_t r = 0; r < v.rows; ++r) {
      int32_t words[24];
      load_int(v, r, 0, v.free, words);
      Core::Generator& g = generators(core, c)[v.partition + r];
      for (int64_t i = 0; i < std::min<int64_t>(6 * g.size(), v.free); ++i)
        g[i / 6].s[i % 6] = static_cast<uint32_t>(words[i]);
    }
  }

  static void rand_get_state(Core& core, const Call& c, int64_t, int64_t) {
    const View& v = c.v[0];
    for (int64_t r = 0; r < v.rows; ++r) {
      int32_t words[24] = {};
      const Core::Generator& g = generators(core, c)[v.partition + r];
      for (size_t i = 0; i < 6 * g.size(); ++i) words[i] = static_cast<int32_t>(g[i / 6].s[i % 6]);
      store_int(v, r, 0, v.free, words);
    }
  }

  static Body body(Opcode opcode) {
    static const auto table = [] {
      std::array<Body, kOpcodes> t{};
      auto set = [&](Opcode o, Body f) { t[static_cast<int>(o)] = f; };
      set(Opcode::dma_copy, dma_copy);
      set(Opcode::dma_compute, dma_compute);
      set(Opcode::dma_transpose, dma_transpose);
      set(Opcode::tensor_copy, tensor_copy);
      set(Opcode::memset, memset);
      set(Opcode::tensor_copy_predicated, tensor_copy_predicated);
      set(Opcode::nc_matmul, matmul);
      set(Opcode::nc_matmul_mx, matmul_mx);
      set(Opcode::nc_transpose, transpose);
      set(Opcode::tensor_tensor, tensor_tensor);
      set(Opcode::tensor_scalar, tensor_scalar);
      set(Opcode::scalar_tensor_tensor, scalar_tensor_tensor);
      set(Opcode::tensor_reduce, tensor_reduce);
      set(Opcode::tensor_partition_reduce, partition_reduce);
      set(Opcode::tensor_scalar_reduce, tensor_scalar_reduce);
      set(Opcode::tensor_scalar_cumulative, tensor_scalar_cumulative);
      set(Opcode::tensor_tensor_scan, tensor_tensor_scan);
      set(Opcode::activation, activation);
      set(Opcode::activate2, activate2);
      set(Opcode::exponential, exponential);
      set(Opcode::reciprocal, reciprocal);
      set(Opcode::select_reduce, select_reduce);
      set(Opcode::range_select, range_select);
      set(Opcode::affine_select, affine_select);
      set(Opcode::iota, iota);
      set(Opcode::dropout, dropout);
      set(Opcode::bn_stats, bn_stats);
      set(Opcode::bn_aggr, bn_aggr);
      set(Opcode::max8, max8);
      set(Opcode::nc_find_index8, find_index8);
      set(Opcode::nc_match_replace8, match_replace8);
      set(Opcode::nc_stream_shuffle, stream_shuffle);
      set(Opcode::local_gather, local_gather);
      set(Opcode::nc_n_gather, n_gather);
      set(Opcode::gather_flattened, n_gather);
      set(Opcode::nonzero_with_count, nonzero);
      set(Opcode::sequence_bounds, sequence_bounds);
      set(Opcode::topk, topk);
      set(Opcode::quantize_mx, quantize_mx);
      set(Opcode::rng, rng);
      set(Opcode::rand2, rand2);
      set(Opcode::set_rng_seed, set_rng_seed);
      set(Opcode::rand_set_state, rand_set_state);
      set(Opcode::rand_get_state, rand_get_state);
      return t;
    }();
    return table[static_cast<int>(opcode)];
  }
};

// ---- core ----------------------------------------------------------------------------------------------------------

namespace {
// Step mode: buffers with an address share this; the pitch is off a multiple of a page to spread over cache sets.
constexpr int64_t kSbufPitch = 256 * 1024 + 320, kPsumPitch = kPsumBytes + 192;
}  // namespace

Core::Core(const Program& program, int program_id, int rank) : program_(program), program_id_(program_id), rank_(rank) {
  seed(0);
}

Core::~Core() = default;

void Core::seed(uint32_t s) {
  for (int e = 0; e < 2; ++e) {
    random_[e].clear();
    for (int64_t p = 0; p < kPartitions; ++p)
      for (int k = 0; k < (e ? 1 : 4); ++k) {
        if (!k) random_[e].emplace_back();
        random_[e].back().emplace_back(s * 2654435761u + static_cast<uint32_t>(e * 4096 + k * 1024 + p));
      }
  }
}

void Core::set_reg(int r, int64_t value) {
  if (static_cast<int>(registers_.size()) <= r) registers_.resize(r + 1);
  registers_[r] = value;
}

void Core::bind(uint32_t storage, void* memory) {
  if (buffers_.size() <= storage) buffers_.resize(storage + 1);
  buffers_[storage].base = static_cast<char*>(memory);
  buffers_[storage].pitch = program_.storages()[storage].row_bytes;
}

void Core::allocate(uint32_t storage) {
  if (buffers_.size() <= storage) buffers_.resize(storage + 1);
  const Storage& s = program_.storages()[storage];
  Buffer& b = buffers_[storage];
  if (s.memory == Memory::psum) {
    if (tracked_.size() <= storage) tracked_.resize(storage + 1), runtime_maps_.resize(storage + 1);
    tracked_[storage] = 1;
    runtime_maps_[storage] = InitMap(s.partitions, s.row_bytes, false);
  }
  if (on_chip(s.memory) && s.address >= 0) {
    const bool psum = s.memory == Memory::psum;
    b.pitch = psum ? kPsumPitch : kSbufPitch;
    if (!arena_[psum]) arena_[psum] = new_aligned(b.pitch * kPartitions);
    b.base = arena_[psum].get() + s.partition_start * b.pitch + s.address;
    return;
  }
  b.pitch = s.row_bytes;
  b.owned = new_aligned(s.partitions * s.row_bytes);
  b.base = b.owned.get();
}

View Core::view(const Operand& operand) const {
  const Access& a = operand.access;
  const Storage& s = program_.storages()[a.storage];
  const Buffer& b = buffers_[a.storage];
  const int64_t item = size_of(a.dtype);
  View v;
  v.dtype = a.dtype;
  v.rows = a.ndim ? a.dims[0].size : 1;
  const int64_t offset = a.reg >= 0 ? placed(a).offset : a.offset;
  if (on_chip(s.memory)) {
    const int64_t row = s.row_bytes / item, p = offset / row;
    v.partition = s.partition_start + p;
    v.base = b.base + p * b.pitch + (offset - p * row) * item;
    v.pitch = b.pitch;
  } else {
    v.base = b.base + offset * item;
    v.pitch = a.ndim ? a.dims[0].stride * item : 0;
  }
  merge(v, a.dims.data() + 1, a.ndim - 1);
  return v;
}

bool Core::reaches(const Access& a) const {
  const int64_t by = placed(a).offset - a.offset;
  return by >= a.reg_low && by <= a.reg_high;
}

std::string Core::beyond(const Access& a) const {
  std::ostringstream out;
  out << "a register is " << registers_[a.reg] << ", so that it begins at element " << placed(a).offset << " of "
      << program_.storages()[a.storage].name << ", outside of the dimension that the register indexes";
  return out.str();
}

bool Core::is_inside(const Access& a) const {
  const Storage& s = program_.storages()[a.storage];
  if (!reaches(a)) return false;
  const Access here = placed(a);
  const Box box = bounding_box(s, here);
  return here.offset >= 0 && box.begin >= 0 && box.end <= s.row_bytes && box.partition_begin >= 0 &&
         box.partition_end <= s.partitions;
}

Core::Call Core::resolve(const Instruction& in, Lane* lane) {
  Call c;
  c.in = &in;
  c.lane = lane;
  c.registers = lane ? &lane->registers : &registers_of_engines_;
  for (size_t i = 0; i < in.operands.size(); ++i)
    if (in.operands[i].is_tile()) {
      const Access& a = in.operands[i].access;
      // DMA looks itself, row by row; it may skip some.
      if (a.reg >= 0 && in.spec().prefer != Engine::dma && !is_inside(a)) {
        const Storage& s = program_.storages()[a.storage];
        throw OutOfBounds(in.spec().name, in.spec().operands[i].name,
                          "is out of bounds: " + beyond(a) + " of " + std::to_string(s.partitions) + " partitions of " +
                              std::to_string(s.row_bytes / size_of(a.dtype)) + " elements",
                          in.source);
      }
      if (a.index && a.index->reg >= 0 && !is_inside(*a.index))
        throw OutOfBounds(in.spec().name, std::string(in.spec().operands[i].name) + "'s index",
                          "is out of bounds: " + beyond(*a.index), in.source);
      c.v[i] = view(in.operands[i]);
    }
  c.v[0].discard = in.discard;
  return c;
}

bool Core::leave_out(const Instruction& in) {
  for (const UnwrittenRows::Row& r : in.unwritten->rows) {
    const View other = view(in.operand(r.operand % 2 ? 2 : 1)), own = view(in.operand(r.operand));
    for (int64_t k = r.begin; k < r.end; ++k)
      for (auto [first, last] : r.columns)
        if (!is_zero(other, k, first, last - first)) return false;
    clear(own, r.row);
  }
  return true;
}

void Core::execute(const Instruction& in) { execute(in, nullptr); }

void Core::execute(const Instruction& in, Lane* lane) {
  if (in.unwritten && program_.proves_unwritten_rows() && !leave_out(in))
    throw in.unwritten->read.also("; " + std::string(in.spec().name) + " @" + std::to_string(in.source) +
                                  " multiplies it by something else than 0, and a result depends on it");
  if (in.runtime_reads) look_at(*in.runtime_reads);
  const auto f = Semantics::body(in.opcode);
  if (!f) {
    if (in.opcode == Opcode::register_move) {
      set_reg(in.reg, value(in.start) + value(in.stop));
    } else if (in.opcode == Opcode::register_load) {
      const View v = view(in.operand(0));
      if (is_integer(v.dtype)) {
        int32_t x;
        load_int(v, 0, 0, 1, &x);
        set_reg(in.reg, v.dtype == Dtype::uint32 ? static_cast<int64_t>(static_cast<uint32_t>(x)) : x);
      } else {
        float buffer;
        const float x = *load(v, 0, 0, 1, &buffer);
        constexpr float kLimit = 2147483648.0f;  // to nearest, saturating, as conversions of tiles
        set_reg(in.reg, std::isnan(x)  ? 0
                        : x >= kLimit  ? INT32_MAX
                        : x <= -kLimit ? INT32_MIN
                                       : static_cast<int64_t>(std::nearbyint(x)));
      }
    } else if (in.opcode == Opcode::register_store) {
      const View v = view(in.operand(0));
      const auto x = static_cast<int32_t>(value(in.start));
      const auto y = static_cast<float>(value(in.start));
      if (is_integer(v.dtype))
        store_int(v, 0, 0, 1, &x);
      else
        store(v, 0, 0, 1, &y);
    } else if (in.opcode == Opcode::allocate && static_cast<size_t>(in.reg) < tracked_.size() && tracked_[in.reg]) {
      runtime_maps_[in.reg] =
          InitMap(program_.storages()[in.reg].partitions, program_.storages()[in.reg].row_bytes, false);
    }
    return;
  }
  Call c = resolve(in, lane);
  // Inputs that the result would overwrite are read first; free elements behind an index are gathered.
  std::vector<std::unique_ptr<Staged>> staged;
  std::vector<std::function<void()>> scatters;
  const InstructionSpec& sp = in.spec();
  // What DMA takes row by row it takes from the buffers themselves.
  const bool by_rows =
      sp.prefer == Engine::dma &&
      (in.opcode != Opcode::dma_copy || in.operand(0).access.is_dynamic() || in.operand(1).access.is_dynamic());
  for (size_t i = 0; i < in.operands.size(); ++i) {
    if (!in.operands[i].is_tile()) continue;
    const Access& a = in.operands[i].access;
    const bool write = sp.operands[i].role == Role::write || sp.operands[i].role == Role::read_write;
    if (a.indexing == Access::Indexing::elements) {
      Operand index;
      index.kind = Operand::Kind::tile;
      index.access = *a.index;
      const View iv = view(index);
      View wide = c.v[i];
      wide.free = a.index_limit;  // elements that one partition's index can reach
      const int64_t group = a.index_stride, item = size_of(a.dtype), n = a.dims[1].size;
      auto stage = std::make_unique<Staged>(c.v[i]);
      std::vector<int32_t> row(iv.free);
      std::vector<std::vector<int32_t>> table(iv.rows, row);
      for (int64_t p = 0; p < iv.rows; ++p) load_int(iv, p, 0, iv.free, table[p].data(), true);
      auto each = [&](auto&& move) {
        for (int64_t p = 0; p < c.v[i].rows; ++p)
          for (int64_t k = 0; k < n; ++k) {
            const int64_t at = table[p / group * group + k % group][k / group];
            if (at < 0 || at >= a.index_limit)
              throw OutOfBounds(sp.name, sp.operands[i].name, "is out of bounds: index " + std::to_string(at),
                                in.source);
            move(wide.row(p) + at * item, stage->view.row(p) + k * item, item);
          }
      };
      if (!write || sp.operands[i].role == Role::read_write)
        each([](char* memory, char* line, int64_t size) { std::memcpy(line, memory, size); });
      View target = stage->view;
      staged.push_back(std::move(stage));
      std::swap(c.v[i], target);
      c.v[i].partition = target.partition;
      if (write)
        scatters.push_back(
            [result = staged.back().get(), table = std::move(table), wide, group, item, n, rows = c.v[i].rows] {
              for (int64_t p = 0; p < rows; ++p)
                for (int64_t k = 0; k < n; ++k)
                  std::memcpy(wide.row(p) + table[p / group * group + k % group][k / group] * item,
                              result->view.row(p) + k * item, item);
            });
    } else if (in.stage >> i & 1 && a.indexing == Access::Indexing::none && !by_rows) {
      auto stage = std::make_unique<Staged>(c.v[i]);
      copy_view(stage->view, c.v[i]);
      stage->view.partition = c.v[i].partition;
      c.v[i] = stage->view;
      staged.push_back(std::move(stage));
    }
  }
  if (!lane && sp.locality == Locality::row && c.v[0].rows * c.v[0].free >= kParallelWork && c.v[0].rows > 1 &&
      !(in.opcode == Opcode::dma_copy &&
        (in.operand(0).access.is_dynamic() || in.operand(1).access.is_dynamic() || c.v[0].rows != c.v[1].rows)))
    parallel_for()(c.v[0].rows, [&](int64_t begin, int64_t end) { f(*this, c, begin, end); });
  else
    f(*this, c, 0, c.v[0].rows);
  for (const auto& scatter : scatters) scatter();
  mark_written(in);
}

Access Core::placed(const Access& a) const {
  Access out = a;
  if (a.reg < 0) return out;
  int64_t by;
  if (__builtin_mul_overflow(registers_.at(a.reg), a.reg_stride, &by) || by > kMostElements || by < -kMostElements)
    by = registers_[a.reg] < 0 ? -kMostElements : kMostElements;  // outside of any buffer all the same
  out.offset += by;
  out.reg = -1;
  return out;
}

int64_t Core::value(const Bound& b) const {
  if (b.reg < 0) return b.value;
  int64_t v;
  if (__builtin_mul_overflow(registers_.at(b.reg), b.scale, &v) || __builtin_add_overflow(v, b.value, &v))
    throw Error("a register's value does not fit 64 bits");
  return v;
}

void Core::resume() {
  mark_written(*waiting_);
  waiting_ = nullptr;
}

void Core::look_at(const RuntimeReads& reads) const {
  for (const RuntimeReads::Read& r : reads.reads)
    if (runtime_maps_[r.access.storage].query(program_.storages()[r.access.storage], placed(r.access)) ==
        InitMap::State::none)
      throw r.error;
}

void Core::enter() {
  const auto& storages = program_.storages();
  buffers_.resize(storages.size());
  if (static_cast<int>(registers_.size()) < program_.registers()) registers_.resize(program_.registers());
  tracked_.assign(storages.size(), 0);
  runtime_maps_.resize(storages.size());
  for (const Instruction& in : program_.instructions()) {
    if (in.opcode == Opcode::nc_matmul || in.opcode == Opcode::nc_matmul_mx)
      if (in.accumulate == Accumulate::automatic) tracked_[in.operand(0).access.storage] = 1;
    if (in.runtime_reads)
      for (const RuntimeReads::Read& r : in.runtime_reads->reads) tracked_[r.access.storage] = 1;
  }
  for (uint32_t i = 0; i < storages.size(); ++i) {
    if (!on_chip(storages[i].memory) && !buffers_[i].base) allocate(i);
    if (tracked_[i]) runtime_maps_[i] = InitMap(storages[i].partitions, storages[i].row_bytes, false);
  }
  if (const Plan& plan = program_.plan(); plan.parts.size() == 1) {
    for (int i = 0; i < 2; ++i)
      if (plan.pitch[i] && !arena_[i]) arena_[i] = new_aligned(plan.pitch[i] * kPartitions);
    char* const arena[2] = {arena_[0].get(), arena_[1].get()};
    place(plan.parts[0], arena);
  }
  position_ = 0;
  entered_ = true;
}

void Core::place(const Part& part, char* const arena[2]) {
  const Plan& plan = program_.plan();
  for (uint32_t i : part.storages) {
    const Storage& s = program_.storages()[i];
    const bool psum = s.memory == Memory::psum;
    buffers_[i].pitch = plan.pitch[psum];
    buffers_[i].base = arena[psum] + s.partition_start * plan.pitch[psum] + plan.placement[i];
  }
}

// A thread runs the parts of its range, then what is left of the others'. Parts share nothing. So one thread touches
// the same memory in each run, which may still be in its cache.
void Core::run_parts() {
  const Plan& plan = program_.plan();
  const auto count = static_cast<int64_t>(plan.parts.size());
  std::vector<std::atomic<bool>> taken(count);
  const auto work = [&](int64_t first, int64_t) {
    thread_local Lane lane;
    lane.begin(plan);
    char* const arena[2] = {lane.arena[0].get(), lane.arena[1].get()};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = (first + k) % count;
      if (taken[i].exchange(true, std::memory_order_relaxed)) continue;
      const Part& part = plan.parts[i];
      place(part, arena);
      for (uint32_t s = part.begin; s < part.end; ++s)
        if (plan.segments[s].row_local)
          run_segment(plan.segments[s], &lane);
        else
          execute(plan.code[plan.segments[s].begin], &lane);
    }
  };
  if (plan.work < kParallelWork)
    work(0, 1);
  else
    parallel_for()(count, work);
}

void Core::run_rows(const CodeSegment& segment, Lane* lane) {
  const Plan& plan = program_.plan();
  const std::span groups(plan.groups.data() + segment.first_group, segment.last_group - segment.first_group);
  const std::span steps(plan.steps.data() + groups.front().begin, groups.back().end - groups.front().begin);
  const auto rows = [&](int64_t begin, int64_t end) {
    const int64_t bytes = plan.row_bytes + (plan.lines + 1) * plan.line_bytes;  // a line more for what streams
    char* own = reinterpret_cast<char*>(scratch(8, bytes / static_cast<int64_t>(sizeof(float))));
    Registers& registers = lane ? lane->registers : registers_of_engines_;
    const auto resolve = [&](const RowOperand& o) -> RowPointer {
      using P = RowOperand::Place;
      const auto in_registers = [&](auto& r) { return RowPointer{reinterpret_cast<char*>(&r[o.partition]), 4, 0}; };
      switch (o.place) {
        case P::none:
          return {};
        case P::number:
          return {const_cast<char*>(reinterpret_cast<const char*>(&o.number)), 0, 0};
        case P::line:
          return {own + plan.row_bytes + o.storage * plan.line_bytes, 0, 0};
        case P::scalar_register:
          return in_registers(registers.scalar);
        case P::vector_register:
          return in_registers(registers.vector);
        case P::memory:
          break;
      }
      const int64_t element = o.one ? 0 : o.stride;
      if (plan.row_offset[o.storage] >= 0) return {own + plan.row_offset[o.storage] + o.offset, 0, element};
      const Buffer& b = buffers_[o.storage];
      if (!on_chip(program_.storages()[o.storage].memory)) return {b.base + o.offset, o.pitch, element};
      return {b.base + o.partition * b.pitch + o.offset, b.pitch, element};
    };
    std::vector<ResolvedStep> resolved;
    resolved.reserve(steps.size());
    for (const RowStep& s : steps) {
      ResolvedStep& r = resolved.emplace_back(&s, resolve(s.to), resolve(s.a), resolve(s.b), resolve(s.c), resolve(s.d),
                                              resolve(s.sum));
      if (!s.streams) continue;
      r.streamed = std::exchange(r.to, {own + bytes - plan.line_bytes, 0, 0});
      r.ahead = resolve(s.ahead);
    }
    run_row_steps(groups, resolved, begin, end);
  };
  int64_t work = 0, first = kPartitions, last = 0;
  for (const RowGroup& g : groups) {
    first = std::min(first, g.first), last = std::max(last, g.last);
    for (uint32_t i = g.begin; i < g.end; ++i) work += plan.steps[i].n * (g.last - g.first);
  }
  if (lane || work < kParallelWork)
    rows(first, last);
  else
    parallel_for()(last - first, [&](int64_t begin, int64_t end) { rows(first + begin, first + end); });
  for (uint32_t i = segment.begin; i < segment.end; ++i) mark_written(plan.code[i]);
}

// For matmuls that decide at run time what they add to, and reads of what only loops write.
void Core::mark_written(const Instruction& in) {
  for (size_t k = 0; k < in.operands.size(); ++k) {
    const Operand& o = in.operands[k];
    if (o.is_tile() && o.access.storage < tracked_.size() && tracked_[o.access.storage] &&
        in.spec().operands[k].role != Role::read) {
      InitMap& map = runtime_maps_[o.access.storage];
      if (o.access.index)
        map.mark_somewhere();
      else
        map.mark(program_.storages()[o.access.storage], placed(o.access));
    }
  }
}

void Core::run_segment(const CodeSegment& segment, Lane* lane) {
  if (segment.first_group < segment.last_group) return run_rows(segment, lane);
  std::vector<Call> calls;
  calls.reserve(segment.end - segment.begin);
  int64_t work = 0;
  for (uint32_t i = segment.begin; i < segment.end; ++i) {
    const Instruction& in = program_.plan().code[i];
    if (in.opcode == Opcode::allocate) {
      execute(in, lane);
      continue;
    }
    calls.push_back(resolve(in, lane));
    for (size_t k = 0; k < in.operands.size(); ++k)
      if (in.operands[k].is_tile() && on_chip(program_.storages()[in.operands[k].access.storage].memory))
        calls.back().partition = calls.back().v[k].partition;
    work += calls.back().v[0].rows * calls.back().v[0].free;
  }
  const int64_t rows = segment.block_rows, n = (kPartitions + rows - 1) / rows;
  const auto blocks = [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b)
      for (const Call& c : calls) {
        const int64_t begin = std::max<int64_t>(0, b * rows - c.partition);
        const int64_t end = std::min(c.v[0].rows, (b + 1) * rows - c.partition);
        if (begin < end) Semantics::body(c.in->opcode)(*this, c, begin, end);
      }
  };
  if (lane || work < kParallelWork)
    blocks(0, n);
  else
    parallel_for()(n, blocks);
  for (const Call& c : calls) mark_written(*c.in);
}

Core::State Core::run() {
  if (!entered_) enter();
  const Plan& plan = program_.plan();
  if (plan.parts.size() > 1) {
    run_parts();
    entered_ = false;
    return State::finished;
  }
  const auto& segments = plan.segments;
  const auto segment_of = [&](uint32_t instruction) {
    return static_cast<uint32_t>(std::upper_bound(segments.begin(), segments.end(), instruction,
                                                  [](uint32_t i, const CodeSegment& s) { return i < s.begin; }) -
                                 segments.begin() - 1);
  };
  while (position_ < segments.size()) {
    const CodeSegment& segment = segments[position_];
    const Instruction& in = plan.code[segment.begin];
    if (segment.row_local) {
      run_segment(segment, nullptr);
      ++position_;
      if (segment.gives_way) return State::ready;
      continue;
    }
    if (in.spec().rendezvous) {
      waiting_ = &in;
      ++position_;
      return State::waiting;
    }
    const bool again = in.opcode == Opcode::loop_end || in.opcode == Opcode::while_end;
    if (again && interrupt_ && ++rounds_ % 1024 == 0) (*interrupt_)();
    switch (in.opcode) {
      case Opcode::loop_begin:
        set_reg(in.reg, value(in.start));
        if (registers_[in.reg] >= value(in.stop)) position_ = segment_of(in.match);
        break;
      case Opcode::loop_end: {
        const Instruction& head = plan.code[in.match];
        registers_[head.reg] += value(head.step);
        if (registers_[head.reg] < value(head.stop)) position_ = segment_of(in.match);
        break;
      }
      case Opcode::while_begin:
        if (!condition(in.reg)) position_ = segment_of(in.match);
        break;
      case Opcode::while_end:
        if (condition(plan.code[in.match].reg)) position_ = segment_of(in.match);
        break;
      default:
        execute(in, nullptr);
    }
    ++position_;
    if (segment.gives_way) return State::ready;
  }
  entered_ = false;
  return State::finished;
}

}  // namespace neuron
