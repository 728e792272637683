// Machine-code loops against the kernels of their steps, one after the other: every operation, narrow types,
// broadcasts, reductions, lengths around the width of a turn, NaNs with bits of their own.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "loops/loop.h"
#include "reductions.h"
#include "simd/kernels.h"
#include "simd/lanes.h"
#include "tile_program.h"
#include "tiles.h"

using namespace neuron;

namespace {

using Lanes = std::vector<uint32_t>;
std::mt19937 generator;
int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(generator); }

uint32_t random_lane(Lane kind) {
  constexpr float kEdges[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-40f, -1e-40f, INFINITY, -INFINITY, 3e38f, -104.0f, 88.5f};
  constexpr uint32_t kNans[] = {0x7fc00000u, 0xffc00000u, 0x7fc12345u, 0xffe00001u};
  if (kind == Lane::i32) return static_cast<uint32_t>(below(5) ? below(200) - 100 : generator());
  if (below(12) == 0) return std::bit_cast<uint32_t>(kEdges[below(std::size(kEdges))]);
  if (below(40) == 0) return kNans[below(std::size(kNans))];
  return std::bit_cast<uint32_t>(std::normal_distribution<float>(0, 3)(generator));
}

// A program in the making, beside what it must compute.
struct Pair {
  int64_t rows, cols;
  TileProgram program;
  std::vector<ValueId> ids;
  std::vector<Lanes> lanes;  // of each value: rows * cols, or one for each row
  std::vector<Lane> kinds;
  std::vector<TileAccess> accesses;
  std::vector<uint32_t> scalars;
  std::vector<std::vector<char>> memory;
  std::vector<std::pair<size_t, Lanes>> expected;  // memory, and the lanes that it must hold
  std::vector<Dtype> types;
  size_t inputs = 0;  // the first memories

  bool full(size_t v) const { return static_cast<int64_t>(lanes[v].size()) == rows * cols; }
  size_t add(ValueId id, Lanes l, Lane kind) {
    ids.push_back(id);
    lanes.push_back(std::move(l));
    kinds.push_back(kind);
    return ids.size() - 1;
  }

  // Full input: every element its own, or each row the same, or each row with a pitch.
  void input(Dtype dtype) {
    const Lane kind = is_integer(dtype) ? Lane::i32 : Lane::f32;
    const int64_t item = size_of(dtype), repeat = below(3) == 0, gap = below(3) == 0 ? 3 : 0;
    const int64_t stride = repeat ? 0 : cols + gap;
    memory.emplace_back(static_cast<size_t>((rows * (cols + gap) + 1) * item));
    types.push_back(dtype);
    char* base = memory.back().data();
    Lanes in(static_cast<size_t>(rows * cols));
    const auto t = static_cast<size_t>(dtype);
    for (size_t i = 0; i < memory.back().size() / static_cast<size_t>(item); i++) {
      uint32_t lane = random_lane(kind);
      char* to = base + static_cast<int64_t>(i) * item;
      if (kind == Lane::i32) {
        const auto whole = static_cast<int32_t>(dtype == Dtype::boolean ? lane & 1 : lane);
        kernels().store_int[t](&whole, 1, to, item);
      } else {
        const float f = std::bit_cast<float>(lane);
        kernels().store[t](&f, 1, to, item);
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      uint32_t* to = &in[static_cast<size_t>(r * cols)];
      const char* from = base + r * stride * item;
      if (kind == Lane::i32)
        kernels().load_int[t](from, item, cols, reinterpret_cast<int32_t*>(to));
      else
        kernels().load[t](from, item, cols, reinterpret_cast<float*>(to));
    }
    const auto m = static_cast<uint16_t>(accesses.size());
    inputs++;
    const bool run = !repeat && !gap;
    accesses.push_back(run ? contiguous(base, rows * cols) : pattern(base, {rows, cols}, {stride, 1}));
    add(program.load(program.access(dtype, Extent::full, m)), in, kind);
  }
  void number() {
    scalars.push_back(random_lane(Lane::f32));
    add(program.scalar(), Lanes(static_cast<size_t>(rows), scalars.back()), Lane::f32);
  }

  size_t pick(Lane kind) {
    for (;;) {
      const auto v = static_cast<size_t>(below(static_cast<int64_t>(ids.size())));
      if (kind == Lane::any || kinds[v] == kind) return v;
    }
  }
  uint32_t at(size_t v, int64_t i) const { return lanes[v][static_cast<size_t>(full(v) ? i : i / cols)]; }

  void map(LaneOp op) {
    const LaneOpInfo& how = info(op);
    size_t in[3] = {};
    bool any_full = false;
    for (int k = 0; k < how.inputs; k++) {
      const Lane kind = op == LaneOp::select ? (k ? Lane::f32 : Lane::i32) : how.in == Lane::any ? Lane::f32 : how.in;
      in[k] = pick(kind);
      any_full |= full(in[k]);
    }
    if (!any_full) return;
    Lanes spread[3], out(static_cast<size_t>(rows * cols));
    for (int k = 0; k < how.inputs; k++)
      for (int64_t i = 0; i < rows * cols; i++) spread[k].push_back(at(in[k], i));
    if (op == LaneOp::iremainder || op == LaneOp::ifmod || op == LaneOp::ifloor_div || op == LaneOp::itrunc_div) return;
    lane_kernels().map[static_cast<size_t>(op)](out.data(), spread[0].data(), spread[1].data(), spread[2].data(), 7,
                                                {rows * cols});
    const ValueId v = program.map(op, ids[in[0]], how.inputs > 1 ? ids[in[1]] : TileProgram::kNone,
                                  how.inputs > 2 ? ids[in[2]] : TileProgram::kNone);
    add(v, out, how.out == Lane::any ? Lane::f32 : how.out);
  }

  void reduce(LaneOp op) {
    const size_t v = pick(info(op).in);
    if (!full(v)) return;
    Lanes out(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; r++) {
      std::vector<uint32_t> pieces;
      for (int64_t c = 0; c < cols; c += kReduceChunk) {
        pieces.push_back(0);
        lane_kernels().reduce[static_cast<size_t>(op)](&pieces.back(), &lanes[v][static_cast<size_t>(r * cols + c)],
                                                       std::min(kReduceChunk, cols - c), 1, 0);
      }
      lane_kernels().reduce[static_cast<size_t>(op)](&out[static_cast<size_t>(r)], pieces.data(),
                                                     static_cast<int64_t>(pieces.size()), 1, 0);
      if (pieces.size() == 1) out[static_cast<size_t>(r)] = pieces[0];
    }
    add(program.reduce(op, ids[v]), out, info(op).out);
  }

  void store(size_t v, Dtype dtype) {
    if (!full(v)) return;
    for (size_t m = 0; m < inputs; m++)  // over an input, which has been read by then
      if (types[m] == dtype && accesses[m].contiguous() && below(2) &&
          std::ranges::none_of(expected, [&](auto& e) { return e.first == m; })) {
        expected.emplace_back(m, lanes[v]);
        accesses.push_back(accesses[m]);
        return program.store(program.access(dtype, Extent::full, static_cast<uint16_t>(m)), ids[v]);
      }
    memory.emplace_back(static_cast<size_t>(rows * cols * size_of(dtype)));
    types.push_back(dtype);
    expected.emplace_back(memory.size() - 1, lanes[v]);
    const auto m = static_cast<uint16_t>(accesses.size());
    accesses.push_back(contiguous(memory.back().data(), rows * cols));
    program.store(program.access(dtype, Extent::full, m), ids[v]);
  }

  // Of one of the last values.
  void store_one() {
    const size_t v =
        ids.size() - 1 - static_cast<size_t>(below(std::min<int64_t>(4, static_cast<int64_t>(ids.size()))));
    if (kinds[v] == Lane::f32)
      store(v, below(3) ? Dtype::float32 : below(2) ? Dtype::bfloat16 : Dtype::float16);
    else
      store(v, below(3) ? Dtype::int32 : below(2) ? Dtype::int8 : Dtype::uint8);
  }

  // Runs it and compares. All the accesses' addresses are those of vectors that never move.
  void check() {
    program.seal();
    const bool flat = !program.has_rows();  // has one column
    const TileRun r{flat ? rows * cols : rows, flat ? 1 : cols, accesses.data(), scalars.data()};
    run(program, {&r, 1}, {});
    for (const auto& [m, want] : expected) {
      const auto t = static_cast<size_t>(types[m]);
      std::vector<char> bytes(static_cast<size_t>(rows * cols * size_of(types[m])));
      if (is_integer(types[m]))
        kernels().store_int[t](reinterpret_cast<const int32_t*>(want.data()), rows * cols, bytes.data(),
                               size_of(types[m]));
      else
        kernels().store[t](reinterpret_cast<const float*>(want.data()), rows * cols, bytes.data(), size_of(types[m]));
      if (std::memcmp(bytes.data(), memory[m].data(), bytes.size()) == 0) continue;
      for (size_t i = 0; i < bytes.size(); i++)
        if (bytes[i] != memory[m][i]) {
          std::printf("\n%lld rows of %lld, element %zu of store %zu:\n%s", static_cast<long long>(rows),
                      static_cast<long long>(cols), i / static_cast<size_t>(size_of(types[m])), m,
                      program.text().c_str());
          break;
        }
      CHECK(false);
    }
  }
};

std::vector<LaneOp> operations() {
  std::vector<LaneOp> ops;
  for (int i = 0; i < kLaneOps; i++) {
    const auto op = static_cast<LaneOp>(i);
    if (!reduces(op) && op != LaneOp::uniform_bits) ops.push_back(op);
  }
  return ops;
}

}  // namespace

// Each operation in a loop of its own with another one before and after it.
TEST(every_operation) {
  for (LaneOp op : operations())
    for (int64_t n : {1, 15, 16, 17, 63, 64, 65, 200, 3000}) {
      Pair p{};
      p.rows = n, p.cols = 1;
      for (int i = 0; i < 3; i++) p.input(Dtype::float32), p.input(Dtype::int32);
      p.number();
      p.map(op);
      const size_t v = p.ids.size() - 1;
      p.map(p.kinds[v] == Lane::i32 ? LaneOp::inot : LaneOp::abs);
      p.store(v, p.kinds[v] == Lane::i32 ? Dtype::int32 : Dtype::float32);
      p.store(p.ids.size() - 1, p.kinds[p.ids.size() - 1] == Lane::i32 ? Dtype::int32 : Dtype::float32);
      p.check();
    }
}

TEST(random_programs) {
  const std::vector<LaneOp> ops = operations();
  constexpr Dtype kTypes[] = {Dtype::float32, Dtype::float32, Dtype::float32,  Dtype::int32,  Dtype::boolean,
                              Dtype::int8,    Dtype::uint8,   Dtype::bfloat16, Dtype::float16};
  size_t loops = 0, calls = 0, reductions = 0;
  const std::vector<uint64_t> all = check::seeds(3000);
  for (uint64_t seed : all) {
    generator.seed(static_cast<uint32_t>(seed));
    const bool has_rows = below(2);
    constexpr int64_t kCols[] = {2, 5, 16, 33, 64, 100, 128, 700, 4096, 4100, 9000};
    Pair p{};
    p.rows = has_rows ? 1 + below(6) : 1 + below(5000);
    p.cols = has_rows ? kCols[below(seed % 10 ? 8 : std::size(kCols))] : 1;
    p.input(Dtype::float32);
    p.input(Dtype::int32);
    for (int64_t k = below(4); k >= 0; k--) p.input(kTypes[below(std::size(kTypes))]);
    for (int64_t k = below(3); k > 0; k--) p.number();
    const int64_t steps = 2 + below(below(8) ? 12 : 90);
    for (int64_t s = 0; s < steps; s++)
      if (below(10) == 0)
        p.store_one();
      else if (has_rows && below(8) == 0)
        p.reduce(kReductions[below(std::size(kReductions))].op);
      else
        p.map(ops[static_cast<size_t>(below(static_cast<int64_t>(ops.size())))]);
    for (int64_t k = 1 + below(4); k > 0; k--) p.store_one();
    p.check();
    for (const Loop& l : p.program.plan().loops) loops++, calls += l.calls, reductions += !l.reductions.empty();
  }
  CHECK(all.size() == 1 || !has_loops() || (loops > 2000 && calls > 500 && reductions > 200));
}
