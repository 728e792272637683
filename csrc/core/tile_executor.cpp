// Runs tile programs: the space is cut into tiles that stay in cache, a tile goes through all steps, tiles are spread
// over threads. Plain contiguous loads and stores cost nothing: steps read and write the memory itself.
//
// Three ways to cut, chosen by shape alone; none of them changes a bit:
//   flat       no reductions: runs of elements
//   resident   reductions over rows of up to a few thousand columns, or full values that need a reduction's result:
//              whole rows
//   streamed   long rows whose reductions feed only row values: pieces of kReduceChunk columns first, then rows
// Column values come last, when all rows have been accumulated.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "accumulate.h"
#include "simd/kernels.h"
#include "simd/lanes.h"
#include "tile_program.h"

namespace neuron {

namespace {

constexpr int64_t kTile = 8192;        // elements; a few buffers of it fit into the second-level cache
constexpr int64_t kLeastTile = 2048;   // fewer cost more than they save
constexpr int64_t kTiles = 16;         // that a tensor should have at least, for threads to share
constexpr int64_t kLeastRow = 32;      // shorter rows cost more than the copies that they save
constexpr double kThreadNs = 30000;    // work that pays for waking threads
constexpr int64_t kLineElements = 16;  // buffers start on cache lines

bool is_float_lane(Dtype t) { return !is_integer(t); }
bool is_lane_type(Dtype t) { return t == Dtype::float32 || t == Dtype::int32; }

// Memory that a thread keeps for tiles.
char* scratch(size_t bytes) {
  struct Buffer {
    char* p = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(p); }
  };
  thread_local Buffer b;
  if (b.size < bytes) {
    std::free(b.p);
    b.size = (bytes + 65535) & ~size_t{65535};
    b.p = static_cast<char*>(std::aligned_alloc(64, b.size));
    if (!b.p) {
      b.size = 0;
      throw std::bad_alloc();
    }
  }
  return b.p;
}

// Moves elements [begin, begin + n) of an access, in runs along its fastest dimension.
template <class Move>
void for_runs(const TileAccess& a, int64_t item, int64_t begin, int64_t n, Move move) {
  if (a.ndim <= 1) {
    const int64_t stride = a.ndim ? a.stride[0] * item : 0;
    return move(a.base + begin * stride, stride, 0, n);
  }
  int64_t index[kTileDims], rest = begin;
  char* p = a.base;
  for (int d = a.ndim - 1; d >= 0; d--) {
    index[d] = rest % a.size[d];
    rest /= a.size[d];
    p += index[d] * a.stride[d] * item;
  }
  const int last = a.ndim - 1;
  const int64_t stride = a.stride[last] * item;
  for (int64_t done = 0; done < n;) {
    const int64_t run = std::min(a.size[last] - index[last], n - done);
    move(p, stride, done, run);
    done += run;
    p += run * stride;
    index[last] += run;
    for (int d = last; d > 0 && index[d] == a.size[d]; d--) {
      p += (a.stride[d - 1] - a.size[d] * a.stride[d]) * item;
      index[d] = 0;
      index[d - 1]++;
    }
  }
}

void load_lanes(const Kernels& k, Dtype dtype, const char* from, int64_t stride, int64_t n, char* to) {
  const int t = static_cast<int>(dtype);
  if (stride == size_of(dtype) && is_lane_type(dtype)) {
    std::memcpy(to, from, static_cast<size_t>(n) * 4);
  } else if (stride == 0 && n > 1) {
    load_lanes(k, dtype, from, size_of(dtype), 1, to);
    uint32_t one;
    std::memcpy(&one, to, 4);
    std::fill_n(reinterpret_cast<uint32_t*>(to), n, one);
  } else if (is_float_lane(dtype)) {
    k.load[t](from, stride, n, reinterpret_cast<float*>(to));
  } else {
    k.load_int[t](from, stride, n, reinterpret_cast<int32_t*>(to));
  }
}

void store_lanes(const Kernels& k, Dtype dtype, const char* from, int64_t n, char* to, int64_t stride) {
  const int t = static_cast<int>(dtype);
  if (stride == size_of(dtype) && is_lane_type(dtype))
    std::memmove(to, from, static_cast<size_t>(n) * 4);
  else if (is_float_lane(dtype))
    k.store[t](reinterpret_cast<const float*>(from), n, to, stride);
  else
    k.store_int[t](reinterpret_cast<const int32_t*>(from), n, to, stride);
}

// What runs of one program and member share.
class Execution {
 public:
  Execution(const TileProgram& program, const TileRun& run)
      : program_(program), run_(run), kernels_(kernels()), lanes_(lane_kernels()) {
    auto lines = [](int64_t n) { return (n + kLineElements - 1) / kLineElements * kLineElements; };
    const bool has_rows = program.has_rows();
    rows_ = run.rows, cols_ = run.cols;
    if (!has_rows) choose_rows();
    for (const TileProgram::Step& step : program.steps())
      if (step.kind == TileProgram::Step::Kind::accumulate) accumulations_.emplace_back(step.op, rows_, cols_);
    const int64_t whole_rows = accumulations_.empty() ? 1 : Accumulation::kRows;  // of one unit, at least
    streamed_ = has_rows && !program.full_after_row() && cols_ > kReduceChunk;
    flat_ = !has_rows && cols_ == 1;
    tile_ = std::clamp(lines(rows_ * cols_ / kTiles), kLeastTile, kTile);
    if (flat_) {
      units_ = (rows_ + tile_ - 1) / tile_;
      pitch_ = std::min(rows_, tile_);
    } else if (streamed_) {
      pieces_ = (cols_ + kReduceChunk - 1) / kReduceChunk;
      unit_rows_ = whole_rows;
      units_ = (rows_ + unit_rows_ - 1) / unit_rows_ * pieces_;
      pitch_ = kReduceChunk;
      partial_.reset(new uint32_t[static_cast<size_t>(program.reductions() * rows_ * pieces_)]);
    } else {
      tile_rows_ = std::clamp<int64_t>(tile_ / cols_, 1, rows_);
      unit_rows_ = (tile_rows_ + whole_rows - 1) / whole_rows * whole_rows;
      units_ = (rows_ + unit_rows_ - 1) / unit_rows_;
      pitch_ = tile_rows_ * cols_;
    }
    pitch_ = lines(pitch_);
    row_pitch_ = has_rows ? lines(streamed_ ? kTile : tile_rows_) : 0;
  }

  int64_t units() const { return units_; }

  // Tiles [begin, end) of the full part, or of everything if the program is not streamed.
  void tiles(int64_t begin, int64_t end) {
    Frame frame(*this);
    for (int64_t unit = begin; unit < end; unit++) {
      if (flat_) {
        const int64_t first = unit * tile_, n = std::min(tile_, rows_ - first);
        frame.tile(first, n, 0, 1, n, Part::all, unit);
        continue;
      }
      const int64_t begin_row = unit / pieces_ * unit_rows_, end_row = std::min(begin_row + unit_rows_, rows_);
      const int64_t column = unit % pieces_ * kReduceChunk, n = std::min(kReduceChunk, cols_ - column);
      for (int64_t row = begin_row; row < end_row; row += tile_rows_) {
        const int64_t rows = std::min(tile_rows_, end_row - row);
        if (streamed_)
          frame.tile(row * cols_ + column, n, row, 1, n, Part::full, row * pieces_ + unit % pieces_);
        else
          frame.tile(row * cols_, rows * cols_, row, rows, cols_, Part::all, unit);
      }
    }
  }

  // What follows after all tiles: the row part of a streamed program, and column values.
  void finish() {
    if (!streamed_ && accumulations_.empty()) return;
    for (Accumulation& a : accumulations_) a.finish();
    Frame frame(*this);
    if (streamed_)
      for (int64_t row = 0; row < rows_; row += kTile)
        frame.tile(0, 0, row, std::min(kTile, rows_ - row), cols_, Part::rows, 0);
    if (!accumulations_.empty())
      for (int64_t column = 0; column < cols_; column += kTile) {
        const int64_t n = std::min(kTile, cols_ - column);
        frame.tile(column, n, 0, 1, n, Part::columns, 0);
      }
  }

 private:
  enum class Part : uint8_t { all, full, rows, columns };

  // Whether a step belongs to a part. Reductions and accumulations take values in one and hand their results on in
  // another.
  static bool belongs(const TileProgram::Step& step, Part part) {
    if (step.kind == TileProgram::Step::Kind::accumulate) return part != Part::rows;
    if (step.extent == Extent::column) return part == Part::columns;
    if (part == Part::columns) return false;
    if (step.kind == TileProgram::Step::Kind::reduce) return true;
    return part != (step.extent == Extent::full ? Part::rows : Part::full);
  }

  // Whether an access consists of the rows of this execution, each one run or one element.
  bool has_rows(const TileAccess& a) const {
    return !flat_ && a.ndim == 2 && a.size[1] == cols_ && (a.stride[1] == 0 || a.stride[1] == 1);
  }

  // Without reductions, rows are as the first operand that is not one run suggests: whole rows need no copies.
  void choose_rows() {
    for (size_t i = 0; i < program_.accesses().size(); i++) {
      const TileAccess& a = run_.accesses[i];
      if (a.ndim != 2 || (a.stride[1] != 0 && a.stride[1] != 1)) continue;
      if (a.size[1] < kLeastRow || a.size[1] > kTile) continue;
      cols_ = a.size[1];
      rows_ = run_.rows / cols_;
      return;
    }
  }

  // Of a reduction in pieces: what came out of each piece of each row.
  uint32_t* partial_of(const TileProgram::Step& step) const {
    return partial_.get() + static_cast<size_t>(step.number * rows_ * pieces_);
  }

  // One thread's buffers and the places of all values.
  struct Frame {
    explicit Frame(Execution& e) : x(e) {
      const auto& program = e.program_;
      buffers = scratch(static_cast<size_t>(program.slots(Extent::full) * e.pitch_ +
                                            program.slots(Extent::row) * e.row_pitch_ +
                                            program.slots(Extent::column) * kTile) *
                            4 +
                        64);
      const auto& values = program.values();
      rows_of.resize(program.accesses().size());
      stored.resize(program.steps().size());
      for (size_t v = 0; v < values.size(); v++) {
        vector[v] = 1;
        narrow_lanes[v] = 0;
        places[v] = nullptr;
        pitch[v] = e.flat_ || values[v].extent == Extent::column ? 0 : e.cols_ * 4;
        if (values[v].from == TileProgram::Value::From::scalar) {
          const uint16_t i = values[v].index;
          place[v] = reinterpret_cast<const char*>(i & 0x8000 ? &program.constants()[i & 0x7fff] : &e.run_.scalars[i]);
          vector[v] = 0;
          pitch[v] = 0;
        } else {
          place[v] = buffer(values[v]);
        }
      }
    }

    const char* buffer(const TileProgram::Value& v) const {
      const auto& program = x.program_;
      const int64_t rows = program.slots(Extent::full) * x.pitch_,
                    columns = rows + program.slots(Extent::row) * x.row_pitch_;
      const int64_t at = v.extent == Extent::full  ? v.slot * x.pitch_
                         : v.extent == Extent::row ? rows + v.slot * x.row_pitch_
                                                   : columns + v.slot * kTile;
      return buffers + at * 4;
    }

    // Elements [first, first + n), which are rows [row, row + rows), `n` columns of one row, or columns.
    void tile(int64_t first, int64_t n, int64_t row, int64_t rows, int64_t cols, Part part, int64_t unit) {
      const auto& program = x.program_;
      // Values that a direct store puts into memory are computed there.
      for (const TileProgram::Step& step : program.steps()) {
        if (step.kind != TileProgram::Step::Kind::store) continue;
        const TileAccess& a = x.run_.accesses[step.access];
        const Dtype dtype = program.accesses()[step.access].dtype;
        if (!step.direct || !is_lane_type(dtype)) continue;
        const ValueId v = step.in[0];
        if (a.contiguous()) {
          place[v] = a.base + (step.extent == Extent::row ? row : first) * 4;
          pitch[v] = step.extent == Extent::column ? 0 : cols * 4;
        } else if (step.extent == Extent::full && x.has_rows(a) && a.stride[1] == 1 && a.stride[0] > 0) {
          place[v] = a.base + (row * a.stride[0] + first % x.cols_) * 4;
          pitch[v] = a.stride[0] * 4;
        }
      }
      for (const LoopPlan::Item& item : program.plan().items) {
        if (item.loop != LoopPlan::Item::kNone) {
          loop(program.plan().loops[item.loop], first, n, row, rows, cols, part, unit);
          continue;
        }
        const TileProgram::Step& step = program.steps()[item.step];
        if (!belongs(step, part)) continue;
        const int64_t begin = step.extent == Extent::row ? row : first, count = step.extent == Extent::row ? rows : n;
        switch (step.kind) {
          case TileProgram::Step::Kind::load:
            load(step, begin, count, rows, cols);
            break;
          case TileProgram::Step::Kind::store: {
            if (stored[item.step]) break;  // by a loop
            const TileAccess& a = x.run_.accesses[step.access];
            const Dtype dtype = program.accesses()[step.access].dtype;
            const ValueId v = step.in[0];
            const char* from = place[v];
            if (step.direct && is_lane_type(dtype) && from != buffer(program.values()[v])) break;  // computed there
            if (vector[v] && step.extent == Extent::full && pitch[v] != cols * 4 && rows > 1) {
              for (int64_t r = 0; r < rows; r++)
                for_runs(a, size_of(dtype), begin + r * cols, cols,
                         [&](char* p, int64_t stride, int64_t at, int64_t run) {
                           store_lanes(x.kernels_, dtype, from + r * pitch[v] + at * 4, run, p, stride);
                         });
            } else if (vector[v]) {
              for_runs(a, size_of(dtype), begin, count, [&](char* p, int64_t stride, int64_t at, int64_t run) {
                store_lanes(x.kernels_, dtype, from + at * 4, run, p, stride);
              });
            } else {
              const int64_t parts = pitch[v] ? rows : 1, length = count / parts;
              for (int64_t r = 0; r < parts; r++) {
                uint32_t one[kLineElements];
                std::fill_n(one, kLineElements, *reinterpret_cast<const uint32_t*>(from + r * pitch[v]));
                for_runs(a, size_of(dtype), begin + r * length, length,
                         [&](char* p, int64_t stride, int64_t, int64_t run) {
                           for (int64_t i = 0; i < run; i += kLineElements)
                             store_lanes(x.kernels_, dtype, reinterpret_cast<const char*>(one),
                                         std::min(kLineElements, run - i), p + i * stride, stride);
                         });
              }
            }
            break;
          }
          case TileProgram::Step::Kind::map:
            map(step, begin, count, rows, cols);
            break;
          case TileProgram::Step::Kind::reduce:
            reduce(step, n, row, rows, cols, part, unit);
            break;
          case TileProgram::Step::Kind::accumulate:
            accumulate(step, x.accumulations_[step.number], first, n, row, rows, cols, part);
            break;
          case TileProgram::Step::Kind::gather:
            gather(step, rows, cols);
            break;
          case TileProgram::Step::Kind::scatter:
            scatter(step, rows, cols);
            break;
          case TileProgram::Step::Kind::gone:
            break;
        }
      }
    }

    // Elements [begin, begin + n) of an access, where they are or copied into the value's buffer.
    void load(const TileProgram::Step& step, int64_t begin, int64_t n, int64_t rows, int64_t cols) {
      const TileAccess& a = x.run_.accesses[step.access];
      const Dtype dtype = x.program_.accesses()[step.access].dtype;
      const int64_t item = size_of(dtype);
      const ValueId v = step.out;
      // Lanes are read where they are; loops read narrower elements there, too.
      const bool narrow = step.extent == Extent::full && x.program_.values()[v].looped && has_loop_form(dtype);
      const bool readable = is_lane_type(dtype) || narrow;
      char* to = const_cast<char*>(buffer(x.program_.values()[v]));
      places[v] = nullptr;
      auto lies = [&](const char* from, int64_t bytes) {
        place[v] = from;
        pitch[v] = bytes;
        vector[v] = 1;
        narrow_lanes[v] = narrow;
      };
      auto copied = [&](bool each, int64_t bytes) {
        place[v] = to;
        pitch[v] = bytes;
        vector[v] = each;
        narrow_lanes[v] = 0;
      };
      if (a.contiguous() && readable) return lies(a.base + begin * item, cols * item);
      if (a.ndim == 0 || (a.ndim == 1 && a.stride[0] == 0)) {
        copied(false, 0);
        return load_lanes(x.kernels_, dtype, a.base, item, 1, to);
      }
      const int last = a.ndim - 1;
      if (step.extent == Extent::full && x.has_rows(a)) {
        const int64_t row = begin / x.cols_, column = begin % x.cols_;
        const char* from = a.base + (row * a.stride[0] + column * a.stride[1]) * item;
        if (a.stride[1] == 0) {  // one element for each row
          copied(false, 4);
          return load_lanes(x.kernels_, dtype, from, a.stride[0] * item, rows, to);
        }
        if (readable) return lies(from, a.stride[0] * item);
        if (a.stride[0] == 0) {  // one row for all
          copied(true, 0);
          return load_lanes(x.kernels_, dtype, from, item, cols, to);
        }
      }
      if (readable && a.stride[last] == 1) {
        // A tile that lies in one run is where it is.
        const int64_t index = begin % a.size[last];
        if (index + n <= a.size[last])
          return for_runs(a, item, begin, 1, [&](const char* p, int64_t, int64_t, int64_t) { lies(p, cols * item); });
      }
      if (readable && step.extent == Extent::full && rows > 1 && x.program_.values()[v].mapped && a.stride[last] == 1 &&
          a.size[last] % cols == 0) {
        std::vector<const char*>& row = rows_of[step.access];
        row.resize(static_cast<size_t>(rows));
        const char** next = row.data();
        for_runs(a, item, begin, n, [&](const char* p, int64_t, int64_t, int64_t run) {
          for (; run > 0; run -= cols, p += cols * item) *next++ = p;
        });
        lies(to, cols * item);
        places[v] = row.data();
        return;
      }
      copied(true, cols * 4);
      for_runs(a, item, begin, n, [&](const char* p, int64_t stride, int64_t at, int64_t run) {
        load_lanes(x.kernels_, dtype, p, stride, run, to + at * 4);
      });
    }

    void map(const TileProgram::Step& step, int64_t begin, int64_t n, int64_t rows, int64_t cols) {
      const auto& values = x.program_.values();
      const LaneKernels::Map kernel = x.lanes_.map[static_cast<int>(step.op)];
      char* out = const_cast<char*>(place[step.out]);
      const char* in[3] = {out, out, out};
      int64_t per_row[3] = {0, 0, 0};
      const char* const* rows_in[3] = {};
      int vectors = 0;
      bool by_rows = false;
      for (int k = 0; k < 3 && step.in[k] != TileProgram::kNone; k++) {
        const ValueId v = step.in[k];
        in[k] = place[v];
        rows_in[k] = places[v];
        by_rows |= places[v] != nullptr;
        if (step.extent == Extent::row) {
          vectors |= vector[v] << k;
          continue;
        }
        const bool row_value = values[v].extent == Extent::row && vector[v];
        if (vector[v] && !row_value) vectors |= 1 << k;
        per_row[k] = row_value ? 4 : pitch[v];
        by_rows |= rows > 1 && per_row[k] != (vectors >> k & 1 ? cols * 4 : 0);
      }
      const int64_t out_pitch = step.extent == Extent::full ? pitch[step.out] : 0;
      by_rows |= step.extent == Extent::full && rows > 1 && out_pitch != cols * 4;
      // One number for all: the same operation on numbers is done once.
      const bool number = step.extent == Extent::full && !vectors && !per_row[0] && !per_row[1] && !per_row[2] &&
                          out == buffer(values[step.out]) && step.op != LaneOp::copy && step.op != LaneOp::uniform_bits;
      vector[step.out] = !number;
      if (number) pitch[step.out] = 0;
      if (number) return kernel(out, in[0], in[1], in[2], vectors, {1, begin});
      if (!by_rows) return kernel(out, in[0], in[1], in[2], vectors, {n, begin});
      // The result may lie over a number that all rows need.
      uint32_t ones[3];
      for (int k = 0; k < 3; k++)
        if (!per_row[k] && !(vectors >> k & 1)) {
          std::memcpy(&ones[k], in[k], 4);
          in[k] = reinterpret_cast<const char*>(&ones[k]);
        }
      kernel(
          out, in[0], in[1], in[2], vectors,
          {cols, begin, rows, out_pitch, {per_row[0], per_row[1], per_row[2]}, {rows_in[0], rows_in[1], rows_in[2]}});
    }

    // Where a store step puts elements from `first` on, if its memory is one run.
    const char* narrow_run(uint16_t store, int64_t first) const {
      const uint16_t i = x.program_.steps()[store].access;
      const TileAccess& a = x.run_.accesses[i];
      return a.contiguous() ? a.base + first * size_of(x.program_.accesses()[i].dtype) : nullptr;
    }

    // A loop over the rows of a tile, or over all at once if they lie one after the other.
    void loop(const Loop& l, int64_t first, int64_t n, int64_t row, int64_t rows, int64_t cols, Part part,
              int64_t unit) {
      const auto& program = x.program_;
      if (part == Part::rows)
        for (uint16_t i : l.reductions) reduce(program.steps()[i], n, row, rows, cols, part, unit);
      if (part != Part::all && part != Part::full) return;
      const size_t inputs = l.inputs.size(), lanes = inputs + l.outputs.size(), all = lanes + l.reductions.size();
      arguments.resize(Loop::kPointers + 2 * all);
      int64_t* p = arguments.data() + Loop::kPointers;
      int64_t* from_row = p + all;
      from_lane.resize(lanes);
      Loop::Layout layout;
      bool by_rows = !l.reductions.empty();
      auto add = [&](size_t k, const char* at, int64_t lane, int64_t pitch) {
        p[k] = reinterpret_cast<int64_t>(at);
        from_lane[k] = lane;
        from_row[k] = pitch;
        by_rows |= rows > 1 && pitch != cols * lane;
      };
      for (size_t k = 0; k < inputs; k++) {
        const ValueId v = l.inputs[k];
        const TileProgram::Value& value = program.values()[v];
        const bool row_value = value.extent == Extent::row && vector[v], each = vector[v] && !row_value;
        const bool narrow = each && narrow_lanes[v];
        if (each) layout.vectors |= uint64_t{1} << k;
        if (narrow) layout.narrow |= uint64_t{1} << k;
        if (places[v]) layout.tables |= uint64_t{1} << k;
        add(k, place[v], each ? (narrow ? size_of(program.accesses()[value.index].dtype) : 4) : 0,
            places[v]   ? reinterpret_cast<int64_t>(places[v])
            : row_value ? 4
                        : pitch[v]);
      }
      for (size_t k = inputs; k < lanes; k++) {
        const Loop::Output& output = l.outputs[k - inputs];
        vector[output.value] = 1;
        const bool may = output.store != Loop::Output::kLanes && k < Loop::Layout::kMost;
        if (const char* at = may ? narrow_run(output.store, first) : nullptr) {
          const int64_t item = size_of(program.accesses()[program.steps()[output.store].access].dtype);
          layout.narrow |= uint64_t{1} << k;
          add(k, at, item, cols * item);
          stored[output.store] = 1;
        } else {
          add(k, place[output.value], 4, pitch[output.value]);
          if (output.store != Loop::Output::kLanes) stored[output.store] = 0;
        }
      }
      // Reductions of all pieces of all rows, from their running lanes.
      const int64_t pieces = l.reductions.empty() ? 1 : (cols + kReduceChunk - 1) / kReduceChunk;
      const auto running_of_one = static_cast<size_t>(rows * pieces * Loop::kReductionLanes);
      running.resize(l.reductions.size() * running_of_one);
      for (size_t i = 0; i < l.reductions.size(); i++) {
        p[lanes + i] = reinterpret_cast<int64_t>(&running[i * running_of_one]);
        from_row[lanes + i] = Loop::kReductionLanes * 4;
      }
      const Loop::Function function = l.function(program, layout);
      auto call = [&](int64_t n_rows, int64_t count) {
        const int64_t rest = count % l.width();
        const uint64_t mask = (uint64_t{1} << rest) - 1;
        arguments[Loop::kRows] = n_rows;
        arguments[Loop::kWhole] = count - rest;
        for (int block = 0; block < Loop::kMostBlocks; block++)
          arguments[static_cast<size_t>(Loop::kMasks + block)] = static_cast<int64_t>(mask >> 16 * block & 0xffff);
        function(arguments.data());
      };
      if (!by_rows) return call(1, n);
      if (pieces == 1) {
        call(rows, cols);
      } else {
        for (int64_t r = 0; r < rows; r++) {
          const std::vector<int64_t> row_begin(p, p + lanes);
          for (int64_t done = 0; done < cols; done += kReduceChunk) {
            for (size_t k = 0; k < lanes; k++) p[k] = row_begin[k] + done * from_lane[k];
            call(1, std::min(kReduceChunk, cols - done));
          }
          for (size_t k = 0; k < lanes; k++) p[k] = row_begin[k] + from_row[k];
        }
      }
      for (size_t i = 0; i < l.reductions.size(); i++) {
        const TileProgram::Step& step = program.steps()[l.reductions[i]];
        const LaneKernels::Reduce kernel = x.lanes_.reduce[static_cast<int>(step.op)];
        auto* out = reinterpret_cast<uint32_t*>(const_cast<char*>(place[step.out]));
        uint32_t* lane = &running[i * running_of_one];
        uint32_t* to = pieces > 1 ? lane : part == Part::full ? x.partial_of(step) + unit : out;
        kernel(to, lane, Loop::kReductionLanes, rows * pieces, Loop::kReductionLanes * 4);
        for (int64_t r = 0; pieces > 1 && r < rows; r++) tree(kernel, out + r, lane + r * pieces, pieces);
      }
    }

    // The tree of a reduction: pieces of kReduceChunk columns, then the pieces likewise.
    void reduce(const TileProgram::Step& step, int64_t n, int64_t row, int64_t rows, int64_t cols, Part part,
                int64_t unit) {
      const LaneKernels::Reduce kernel = x.lanes_.reduce[static_cast<int>(step.op)];
      char* out = const_cast<char*>(place[step.out]);
      uint32_t* partial = x.partial_of(step);
      const ValueId v = step.in[0];
      if (part == Part::rows) {
        for (int64_t r = 0; r < rows; r++) tree(kernel, out + r * 4, partial + (row + r) * x.pieces_, x.pieces_);
        return;
      }
      const char* in = place[v];
      std::unique_ptr<uint32_t[]> spread;
      const bool row_value = x.program_.values()[v].extent == Extent::row;
      if (!vector[v] || row_value) {  // one number for the whole row
        spread.reset(new uint32_t[static_cast<size_t>(n)]);
        const int64_t step_bytes = row_value ? (vector[v] ? 4 : 0) : pitch[v];
        for (int64_t r = 0; r < rows; r++)
          std::fill_n(spread.get() + r * cols, cols, *reinterpret_cast<const uint32_t*>(in + r * step_bytes));
        in = reinterpret_cast<const char*>(spread.get());
      }
      const int64_t from_row = spread ? cols * 4 : pitch[v];
      if (part == Part::full) return kernel(partial + unit, in, n, 1, 0);
      if (cols <= kReduceChunk) return kernel(out, in, cols, rows, from_row);
      for (int64_t r = 0; r < rows; r++) tree(kernel, out + r * 4, in + r * from_row, cols);
    }

    // Lanes of row r of a value in this tile; `all`: whether there is one for each column.
    const char* lanes_of(ValueId v, int64_t r, bool& all) const {
      const bool row_value = x.program_.values()[v].extent == Extent::row;
      all = vector[v] && !row_value;
      return place[v] + r * (row_value ? (vector[v] ? 4 : 0) : pitch[v]);
    }

    void accumulate(const TileProgram::Step& step, Accumulation& sums, int64_t first, int64_t n, int64_t row,
                    int64_t rows, int64_t cols, Part part) {
      if (part == Part::columns) {
        std::memcpy(const_cast<char*>(place[step.out]), sums.result() + first * 4, static_cast<size_t>(n) * 4);
        return;
      }
      bool all;
      const char* lanes = lanes_of(step.in[0], 0, all);
      sums.add(row, rows, first % x.cols_, lanes, lanes_of(step.in[0], 1, all) - lanes, all, cols);
    }

    int64_t column_of(ValueId index, int64_t r) const {
      bool all;
      return *reinterpret_cast<const int32_t*>(lanes_of(index, r, all));
    }

    void gather(const TileProgram::Step& step, int64_t rows, int64_t cols) {
      auto* out = reinterpret_cast<uint32_t*>(const_cast<char*>(place[step.out]));
      for (int64_t r = 0; r < rows; r++) {
        bool all;
        const char* lanes = lanes_of(step.in[0], r, all);
        const int64_t column = column_of(step.in[1], r);
        out[r] = column < 0 || column >= cols ? 0 : reinterpret_cast<const uint32_t*>(lanes)[all ? column : 0];
      }
    }

    void scatter(const TileProgram::Step& step, int64_t rows, int64_t cols) {
      for (int64_t r = 0; r < rows; r++) {
        bool all;
        const char* lane = lanes_of(step.in[0], r, all);
        const int64_t column = column_of(step.in[1], r);
        auto* out = reinterpret_cast<uint32_t*>(const_cast<char*>(place[step.out]) + r * pitch[step.out]);
        std::fill_n(out, cols, 0u);
        if (column >= 0 && column < cols) std::memcpy(out + column, lane, 4);
      }
    }

    static void tree(LaneKernels::Reduce kernel, void* out, const void* in, int64_t n) {
      if (n <= kReduceChunk) return kernel(out, in, n, 1, 0);
      const int64_t pieces = (n + kReduceChunk - 1) / kReduceChunk;
      std::unique_ptr<uint32_t[]> partial(new uint32_t[static_cast<size_t>(pieces)]);
      for (int64_t i = 0; i < pieces; i++)
        kernel(&partial[static_cast<size_t>(i)], static_cast<const char*>(in) + i * kReduceChunk * 4,
               std::min(kReduceChunk, n - i * kReduceChunk), 1, 0);
      tree(kernel, out, partial.get(), pieces);
    }

    Execution& x;
    char* buffers;
    const char* place[TileProgram::kMaxValues];
    uint8_t vector[TileProgram::kMaxValues];             // has a lane for each element, or each row of a row value
    uint8_t narrow_lanes[TileProgram::kMaxValues];       // lies as elements of its access's type, which loops read
    int64_t pitch[TileProgram::kMaxValues];              // of full values: bytes from row to row
    const char* const* places[TileProgram::kMaxValues];  // of full values whose rows lie anywhere: where each is
    std::vector<std::vector<const char*>> rows_of;       // of each access: what `places` points to
    std::vector<uint8_t> stored;                         // of each store: a loop has done it
    // Of the loop that runs.
    std::vector<int64_t> arguments, from_lane;
    std::vector<uint32_t> running;
  };

  const TileProgram& program_;
  const TileRun& run_;
  const Kernels& kernels_;
  const LaneKernels& lanes_;
  bool streamed_ = false, flat_ = false;
  int64_t rows_, cols_, tile_, units_ = 0, pieces_ = 1, tile_rows_ = 1, unit_rows_ = 1, pitch_ = 0, row_pitch_ = 0;
  std::unique_ptr<uint32_t[]> partial_;  // of each reduction: rows * pieces
  std::vector<Accumulation> accumulations_;
};

double work(const TileProgram& program, const TileRun& run) {
  return program.cost() * static_cast<double>(run.rows) * static_cast<double>(run.cols);
}

}  // namespace

void run(const TileProgram& program, std::span<const TileRun> runs, const TileParallel& parallel) {
  double total = 0;
  for (const TileRun& r : runs) total += work(program, r);
  const bool threads = parallel && total > kThreadNs;
  if (runs.size() == 1 || !threads) {
    for (const TileRun& r : runs) {
      if (r.rows * r.cols == 0) continue;
      Execution e(program, r);
      if (threads && e.units() > 1)
        parallel(e.units(), [&](int64_t begin, int64_t end) { e.tiles(begin, end); });
      else
        e.tiles(0, e.units());
      e.finish();
    }
    return;
  }
  // Many tensors: all tiles are one range.
  std::vector<std::unique_ptr<Execution>> all;
  std::vector<int64_t> start{0};
  for (const TileRun& r : runs) {
    if (r.rows * r.cols == 0) continue;
    all.push_back(std::make_unique<Execution>(program, r));
    start.push_back(start.back() + all.back()->units());
  }
  if (all.empty()) return;
  parallel(start.back(), [&](int64_t begin, int64_t end) {
    size_t i = static_cast<size_t>(std::upper_bound(start.begin(), start.end(), begin) - start.begin()) - 1;
    for (; begin < end; i++) {
      const int64_t stop = std::min(end, start[i + 1]);
      all[i]->tiles(begin - start[i], stop - start[i]);
      begin = stop;
    }
  });
  for (auto& e : all) e->finish();
}

}  // namespace neuron
