// Tile programs against plain loops.
#include "tile_program.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "simd/lanes.h"
#include "tiles.h"

using namespace neuron;

namespace {

std::vector<float> uniform(int64_t n, float low, float high, uint64_t seed) {
  std::mt19937_64 r(seed);
  std::uniform_real_distribution<float> d(low, high);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(r);
  return v;
}

void two_threads(int64_t n, const std::function<void(int64_t, int64_t)>& body) {
  std::thread other([&] { body(0, n / 2); });
  body(n / 2, n);
  other.join();
}

void run_one(const TileProgram& p, int64_t rows, int64_t cols, std::vector<TileAccess> accesses,
             std::vector<uint32_t> scalars = {0}, const TileParallel& parallel = {}) {
  const TileRun r{rows, cols, accesses.data(), scalars.data()};
  run(p, {&r, 1}, parallel);
}

uint32_t bits(float f) { return std::bit_cast<uint32_t>(f); }

}  // namespace

TEST(a_chain_reads_and_writes_memory_directly) {
  for (int64_t n : {1, 7, 2048, 2049, 100003}) {
    auto x = uniform(n, -1, 1, 1), y = uniform(n, -1, 1, 2);
    std::vector<float> out(x.size());
    TileProgram p;
    const ValueId a = p.load(p.access(Dtype::float32, Extent::full, 0));
    const ValueId b = p.load(p.access(Dtype::float32, Extent::full, 1));
    const ValueId t = p.map(LaneOp::mul, a, p.scalar());
    const ValueId u = p.map(LaneOp::add, t, b);
    p.store(p.access(Dtype::float32, Extent::full, 2), p.map(LaneOp::maximum, u, p.constant(bits(0.25f))));
    p.seal();
    for (const TileParallel& parallel : {TileParallel{}, TileParallel{two_threads}}) {
      std::fill(out.begin(), out.end(), -9.0f);
      run_one(p, n, 1, {contiguous(x.data(), n), contiguous(y.data(), n), contiguous(out.data(), n)}, {bits(3)},
              parallel);
      for (size_t i = 0; i < out.size(); i++) {
        const float product = x[i] * 3;
        CHECK_EQ(out[i], std::max(product + y[i], 0.25f));
      }
    }
  }
}

TEST(in_place_results_do_not_reach_earlier_reads) {
  const int64_t n = 5000;
  auto x = uniform(n, -1, 1, 1);
  const auto before = x;
  std::vector<float> out(x.size());
  TileProgram p;
  const ValueId a = p.load(p.access(Dtype::float32, Extent::full, 0));
  const ValueId next = p.map(LaneOp::add, a, p.scalar());
  const ValueId old = p.map(LaneOp::neg, a);  // reads x after its new value was computed
  p.store(p.access(Dtype::float32, Extent::full, 0), next);
  p.store(p.access(Dtype::float32, Extent::full, 1), old);
  p.seal();
  run_one(p, n, 1, {contiguous(x.data(), n), contiguous(x.data(), n), contiguous(out.data(), n)}, {bits(1)});
  for (size_t i = 0; i < out.size(); i++) {
    CHECK_EQ(x[i], before[i] + 1);
    CHECK_EQ(out[i], -before[i]);
  }
}

TEST(stores_wait_for_what_was_loaded_from_the_same_memory) {
  const int64_t n = 5000;
  auto x = uniform(n, -1, 1, 1);
  const auto before = x;
  std::vector<float> out(x.size());
  TileProgram p;
  const ValueId a = p.load(p.access(Dtype::float32, Extent::full, 0));
  p.store(p.access(Dtype::float32, Extent::full, 0), p.expand(p.constant(0), Extent::full));
  p.store(p.access(Dtype::float32, Extent::full, 1), p.map(LaneOp::mul, a, p.scalar()));
  p.seal();
  run_one(p, n, 1, {contiguous(x.data(), n), contiguous(x.data(), n), contiguous(out.data(), n)}, {bits(3)});
  for (size_t i = 0; i < out.size(); i++) {
    CHECK_EQ(x[i], 0.0f);
    CHECK_EQ(out[i], before[i] * 3);
  }
}

TEST(strided_and_repeated_operands) {
  const int64_t rows = 37, cols = 53;
  auto x = uniform(rows * cols, -1, 1, 1), row = uniform(cols, -1, 1, 2), column = uniform(rows, -1, 1, 3);
  std::vector<float> out(static_cast<size_t>(rows * cols));
  TileProgram p;
  const ValueId a = p.load(p.access(Dtype::float32, Extent::full, 0));
  const ValueId b = p.load(p.access(Dtype::float32, Extent::full, 1));
  const ValueId c = p.load(p.access(Dtype::float32, Extent::full, 2));
  const ValueId d = p.load(p.access(Dtype::float32, Extent::full, 3));
  p.store(p.access(Dtype::float32, Extent::full, 4),
          p.map(LaneOp::add, p.map(LaneOp::mul, p.map(LaneOp::add, a, b), c), d));
  p.seal();
  float seven = 7;
  run_one(p, rows * cols, 1,
          {pattern(x.data(), {rows, cols}, {1, rows}), pattern(row.data(), {rows, cols}, {0, 1}),
           pattern(column.data(), {rows, cols}, {1, 0}), pattern(&seven, {rows * cols}, {0}),
           pattern(out.data(), {rows, cols}, {1, rows})});
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < cols; k++) {
      const float sum = x[static_cast<size_t>(r + k * rows)] + row[static_cast<size_t>(k)];
      const float product = sum * column[static_cast<size_t>(r)];
      CHECK_EQ(out[static_cast<size_t>(r + k * rows)], product + 7);
    }
}

// The tree that a sum promises, written out.
float tree(std::vector<float> x) {
  if (x.size() > static_cast<size_t>(kReduceChunk)) {
    std::vector<float> parts;
    for (size_t i = 0; i < x.size(); i += kReduceChunk)
      parts.push_back(tree(
          {x.begin() + static_cast<long>(i), x.begin() + static_cast<long>(std::min(x.size(), i + kReduceChunk))}));
    return tree(parts);
  }
  float lane[32] = {};
  for (size_t i = 0; i < x.size(); i++) lane[i % 32] += x[i];
  for (int w = 16; w; w /= 2)
    for (int j = 0; j < w; j++) lane[j] += lane[j + w];
  return lane[0];
}

TEST(sums_follow_the_tree_alone_and_before_full_values) {
  for (auto [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {300, 17}, {3, 4096}, {2, 4097}, {1, 50000}, {7, 9000}}) {
    auto x = uniform(rows * cols, -1, 1, static_cast<uint64_t>(cols));
    std::vector<float> sums(static_cast<size_t>(rows)), doubled(sums.size()), out(x.size());
    TileProgram alone, before;
    {
      const ValueId v = alone.load(alone.access(Dtype::float32, Extent::full, 0));
      const ValueId s = alone.reduce(LaneOp::sum, v);
      alone.store(alone.access(Dtype::float32, Extent::row, 1), s);
      alone.store(alone.access(Dtype::float32, Extent::row, 2), alone.map(LaneOp::add, s, s));
      alone.seal();
    }
    {
      const ValueId v = before.load(before.access(Dtype::float32, Extent::full, 0));
      before.store(before.access(Dtype::float32, Extent::full, 1),
                   before.map(LaneOp::sub, v, before.reduce(LaneOp::sum, v)));
      before.seal();
    }
    for (const TileParallel& parallel : {TileParallel{}, TileParallel{two_threads}}) {
      run_one(alone, rows, cols,
              {contiguous(x.data(), rows * cols), contiguous(sums.data(), rows), contiguous(doubled.data(), rows)}, {0},
              parallel);
      run_one(before, rows, cols, {contiguous(x.data(), rows * cols), contiguous(out.data(), rows * cols)}, {0},
              parallel);
      for (int64_t r = 0; r < rows; r++) {
        const float want = tree({x.begin() + r * cols, x.begin() + (r + 1) * cols});
        CHECK_EQ(sums[static_cast<size_t>(r)], want);
        CHECK_EQ(doubled[static_cast<size_t>(r)], want + want);
        for (int64_t c = 0; c < cols; c++)
          CHECK_EQ(out[static_cast<size_t>(r * cols + c)], x[static_cast<size_t>(r * cols + c)] - want);
      }
    }
  }
}

// The order that sums of columns promise, written out: chunks of 32 rows, then what they give likewise.
std::vector<float> column_sums(std::vector<std::vector<float>> rows) {
  while (true) {
    std::vector<std::vector<float>> chunks;
    for (size_t r = 0; r < rows.size(); r++) {
      if (r % 32 == 0)
        chunks.push_back(rows[r]);
      else
        for (size_t c = 0; c < rows[r].size(); c++) chunks.back()[c] += rows[r][c];
    }
    if (chunks.size() == 1) return chunks[0];
    rows = chunks;
  }
}

TEST(sums_of_columns_follow_their_order_alone_and_beside_row_sums) {
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                            {5, 3},
                            {32, 48},
                            {33, 48},
                            {3000, 1},
                            {3000, 7},
                            {100, 3000},
                            {2049, 65},
                            {70, 4097},
                            {40, 9000}}) {
    auto x = uniform(rows * cols, -1, 1, static_cast<uint64_t>(cols));
    std::vector<float> sums(static_cast<size_t>(cols)), half(sums.size()), totals(static_cast<size_t>(rows)),
        least(sums.size()), weighted(sums.size());
    TileProgram p, full;
    {
      const ValueId v = p.load(p.access(Dtype::float32, Extent::full, 0));
      const ValueId s = p.accumulate(LaneOp::sum, v);
      p.store(p.access(Dtype::float32, Extent::column, 1), s);
      p.store(p.access(Dtype::float32, Extent::column, 2), p.map(LaneOp::mul, s, p.constant(bits(0.5f))));
      p.store(p.access(Dtype::float32, Extent::row, 3), p.reduce(LaneOp::sum, v));
      p.store(p.access(Dtype::float32, Extent::column, 4), p.accumulate(LaneOp::amin, v));
      p.seal();
    }
    {  // of values that follow from row sums
      const ValueId v = full.load(full.access(Dtype::float32, Extent::full, 0));
      const ValueId w = full.map(LaneOp::mul, v, full.reduce(LaneOp::sum, v));
      full.store(full.access(Dtype::float32, Extent::column, 1), full.accumulate(LaneOp::sum, w));
      full.seal();
    }
    std::vector<std::vector<float>> plain, scaled;
    for (int64_t r = 0; r < rows; r++) {
      plain.emplace_back(x.begin() + r * cols, x.begin() + (r + 1) * cols);
      const float total = tree(plain.back());
      scaled.push_back(plain.back());
      for (float& y : scaled.back()) y *= total;
    }
    const std::vector<float> want = column_sums(plain), want_weighted = column_sums(scaled);
    for (const TileParallel& parallel : {TileParallel{}, TileParallel{two_threads}}) {
      run_one(p, rows, cols,
              {contiguous(x.data(), rows * cols), contiguous(sums.data(), cols), contiguous(half.data(), cols),
               contiguous(totals.data(), rows), contiguous(least.data(), cols)},
              {0}, parallel);
      run_one(full, rows, cols, {contiguous(x.data(), rows * cols), contiguous(weighted.data(), cols)}, {0}, parallel);
      for (size_t c = 0; c < sums.size(); c++) {
        float smallest = INFINITY;
        for (const auto& row : plain) smallest = std::min(smallest, row[c]);
        CHECK_EQ(sums[c], want[c]);
        CHECK_EQ(half[c], want[c] * 0.5f);
        CHECK_EQ(least[c], smallest);
        CHECK_EQ(weighted[c], want_weighted[c]);
      }
      for (size_t r = 0; r < totals.size(); r++) CHECK_EQ(totals[r], tree(plain[r]));
    }
  }
}

TEST(gather_and_scatter_take_one_column_of_each_row) {
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {300, 17}, {7, 9000}}) {
    auto x = uniform(rows * cols, 1, 2, static_cast<uint64_t>(cols));
    std::vector<int32_t> index(static_cast<size_t>(rows));
    for (size_t r = 0; r < index.size(); r++)
      index[r] = r % 5 == 4   ? -1
                 : r % 5 == 3 ? static_cast<int32_t>(cols)
                              : static_cast<int32_t>(r * 31 % static_cast<size_t>(cols));
    std::vector<float> taken(index.size()), put(x.size());
    TileProgram p;
    const ValueId v = p.load(p.access(Dtype::float32, Extent::full, 0));
    const ValueId at = p.load(p.access(Dtype::int32, Extent::row, 1));
    const ValueId g = p.gather(p.map(LaneOp::neg, v), at);
    p.store(p.access(Dtype::float32, Extent::row, 2), g);
    p.store(p.access(Dtype::float32, Extent::full, 3), p.scatter(p.map(LaneOp::add, g, g), at));
    p.seal();
    run_one(p, rows, cols,
            {contiguous(x.data(), rows * cols), contiguous(index.data(), rows), contiguous(taken.data(), rows),
             contiguous(put.data(), rows * cols)},
            {0}, two_threads);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t column = index[static_cast<size_t>(r)];
      const bool inside = column >= 0 && column < cols;
      const float want = inside ? -x[static_cast<size_t>(r * cols + column)] : 0.0f;
      CHECK_EQ(taken[static_cast<size_t>(r)], want);
      for (int64_t c = 0; c < cols; c++)
        CHECK_EQ(put[static_cast<size_t>(r * cols + c)], inside && c == column ? want + want : 0.0f);
    }
  }
}

TEST(types_are_converted_at_loads_and_stores) {
  const int64_t n = 3000;
  std::vector<int8_t> x(static_cast<size_t>(n));
  std::vector<uint16_t> half(x.size());
  std::vector<uint8_t> flag(x.size());
  for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<int8_t>(i * 7);
  TileProgram p;
  const ValueId a = p.load(p.access(Dtype::int8, Extent::full, 0));
  p.store(p.access(Dtype::bfloat16, Extent::full, 1), p.map(LaneOp::round_bf16, p.map(LaneOp::to_float, a)));
  p.store(p.access(Dtype::boolean, Extent::full, 2), p.map(LaneOp::igt, a, p.constant(5)));
  p.store(p.access(Dtype::int8, Extent::full, 0), p.map(LaneOp::wrap_i8, p.map(LaneOp::iadd, a, p.constant(100))));
  p.seal();
  const auto before = x;
  run_one(p, n, 1,
          {contiguous(x.data(), n), contiguous(half.data(), n), contiguous(flag.data(), n), contiguous(x.data(), n)});
  for (size_t i = 0; i < x.size(); i++) {
    CHECK_EQ(x[i], static_cast<int8_t>(before[i] + 100));
    CHECK_EQ(half[i], static_cast<uint16_t>(bits(static_cast<float>(before[i])) >> 16));
    CHECK_EQ(flag[i], before[i] > 5);
  }
}

TEST(many_tensors_run_as_one) {
  TileProgram p;
  const ValueId a = p.load(p.access(Dtype::float32, Extent::full, 0));
  p.store(p.access(Dtype::float32, Extent::full, 0), p.map(LaneOp::mul, a, p.scalar()));
  p.seal();
  std::vector<std::vector<float>> tensors;
  std::vector<std::vector<TileAccess>> accesses;
  std::vector<TileRun> runs;
  std::vector<uint32_t> scalars;
  for (int i = 0; i < 40; i++)
    tensors.push_back(uniform(i * 977, -1, 1, static_cast<uint64_t>(i))),
        scalars.push_back(bits(static_cast<float>(i)));
  const auto before = tensors;
  for (size_t i = 0; i < tensors.size(); i++) {
    const auto n = static_cast<int64_t>(tensors[i].size());
    accesses.push_back({contiguous(tensors[i].data(), n), contiguous(tensors[i].data(), n)});
    runs.push_back({n, 1, accesses.back().data(), &scalars[i]});
  }
  run(p, runs, two_threads);
  for (size_t i = 0; i < tensors.size(); i++)
    for (size_t k = 0; k < tensors[i].size(); k++) CHECK_EQ(tensors[i][k], before[i][k] * static_cast<float>(i));
}

TEST(random_bits_are_philox_and_do_not_depend_on_tiles) {
  TileProgram p;
  ValueId seed = p.scalar();
  for (int i = 0; i < 3; i++) p.scalar();
  p.store(p.access(Dtype::int32, Extent::full, 0), p.map(LaneOp::uniform_bits, seed));
  p.seal();
  std::vector<uint32_t> long_run(10007), short_run(9);
  run_one(p, 10007, 1, {contiguous(long_run.data(), 10007)}, {0, 0, 0, 0}, two_threads);
  run_one(p, 9, 1, {contiguous(short_run.data(), 9)}, {0, 0, 0, 0});
  CHECK(std::equal(short_run.begin(), short_run.end(), long_run.begin()));
  // Known answer of Philox4x32-10 for key 0 and counter 0 (Random123).
  CHECK_EQ(long_run[0], 0x6627e8d5u);
  CHECK_EQ(long_run[1], 0xe169c58du);
  CHECK_EQ(long_run[2], 0xbc57ac4cu);
  CHECK_EQ(long_run[3], 0x9b00dbd8u);
}

TEST(pow_has_the_special_values_of_the_c_library) {
  const float special[] = {0.0f,  -0.0f,  1.0f,   -1.0f,    2.0f,      -2.0f, 0.5f,        -0.5f, 3.0f, -3.0f,
                           1e30f, -1e30f, 1e-40f, INFINITY, -INFINITY, NAN,   16777217.0f, 2.5f,  -2.5f};
  for (float a : special)
    for (float b : special) {
      float out;
      lane_kernels().map[static_cast<int>(LaneOp::pow)](&out, &a, &b, nullptr, 3, {1});
      const float want = std::pow(a, b);
      if (std::isnan(want))
        CHECK(std::isnan(out));
      else if (std::isinf(want) || want == 0 || std::fabs(want) == 1)
        CHECK_EQ(bits(out), bits(want));
      else
        CHECK(std::max(bits(out), bits(want)) - std::min(bits(out), bits(want)) <= 1);
    }
}

TEST(special_values_of_functions) {
  const float special[] = {0.0f, -0.0f, 1e-40f, -1e-40f, INFINITY, -INFINITY, NAN, 3.4e38f, -3.4e38f, -1.0f, 1.0f};
  struct Case {
    LaneOp op;
    double (*truth)(double);
  } cases[] = {{LaneOp::exp, std::exp},     {LaneOp::exp2, std::exp2}, {LaneOp::expm1, std::expm1},
               {LaneOp::log, std::log},     {LaneOp::log2, std::log2}, {LaneOp::log10, std::log10},
               {LaneOp::log1p, std::log1p}, {LaneOp::tanh, std::tanh}, {LaneOp::erf, std::erf},
               {LaneOp::sin, std::sin},     {LaneOp::cos, std::cos},   {LaneOp::tan, std::tan}};
  for (const Case& c : cases)
    for (float x : special) {
      float y;
      lane_kernels().map[static_cast<int>(c.op)](&y, &x, nullptr, nullptr, 1, {1});
      const auto want = static_cast<float>(c.truth(x));
      if (std::isnan(want) || std::isinf(want) || want == 0) {
        if (std::isnan(want) ? !std::isnan(y) : bits(y) != bits(want))
          check::fail(__FILE__, __LINE__, info(c.op).name, "(", x, ") is ", y, ", not ", want);
      } else {
        const double off = std::fabs(y - static_cast<double>(want)) / std::fabs(static_cast<double>(want));
        if (off > 1e-5 && bits(y) - bits(want) + 1 > 2)
          check::fail(__FILE__, __LINE__, info(c.op).name, "(", x, ") is ", y, ", not ", want);
      }
    }
}

// Which of two NaNs an operation hands on is not part of its meaning: all are one here.
TEST(merged_operations_have_the_bits_of_their_steps) {
  const float special[] = {0.0f, -0.0f, 1e-40f, 3e-39f, INFINITY, -INFINITY, NAN, 3.4e38f, -1.0f, 1.0f, 88.5f, -104.5f};
  std::vector<float> in[3];
  for (int k = 0; k < 3; k++) {
    in[k] = uniform(1000, -20, 20, 7 + static_cast<uint64_t>(k));
    for (size_t i = 0; i < 500; i++) in[k][i] = special[(i / (k == 0 ? 1 : k == 1 ? 12 : 5)) % 12];
  }
  auto run = [](LaneOp op, const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& c) {
    std::vector<float> out(a.size());
    lane_kernels().map[static_cast<int>(op)](out.data(), a.data(), b.data(), c.data(), 7,
                                             {static_cast<int64_t>(a.size())});
    return out;
  };
  struct Case {
    LaneOp merged, first, second;
    bool swapped;  // the first one's result is the second one's second input
  };
  using enum LaneOp;
  const auto &a = in[0], &b = in[1], &c = in[2];
  for (const Case& t : {Case{mul_add, mul, add, false},
                        {mul_sub, mul, sub, false},
                        {mul_rsub, mul, sub, true},
                        {mul_mul, mul, mul, false},
                        {add_mul, add, mul, false},
                        {add_add, add, add, false},
                        {sub_mul, sub, mul, false},
                        {sub_add, sub, add, false},
                        {div_add, add, div, true}}) {
    const auto step = run(t.first, a, b, c);
    const auto want = t.swapped ? run(t.second, c, step, c) : run(t.second, step, c, c), got = run(t.merged, a, b, c);
    for (size_t i = 0; i < a.size(); i++) CHECK_EQ(bits(got[i]), bits(want[i]));
  }
  auto same = [&](LaneOp merged, const std::vector<float>& want) {
    const auto got = run(merged, a, b, c);
    for (size_t i = 0; i < a.size(); i++)
      if (std::isnan(want[i]))
        CHECK(std::isnan(got[i]));
      else
        CHECK_EQ(bits(got[i]), bits(want[i]));
  };
  same(exp_neg, run(exp, run(neg, a, b, c), b, c));
  same(swish, run(LaneOp::div, a, run(add, b, run(exp_neg, a, b, c), c), c));
  same(swish_mul, run(mul, run(swish, a, b, c), c, c));
}
