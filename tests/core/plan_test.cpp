// Plans: leaving out copies, discarding dead rows and running parts on threads never changes a result.
#include "plan.h"

#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "executor.h"
#include "program.h"

using namespace neuron;

namespace {

Operand tile(uint32_t storage, int64_t rows, int64_t columns, int64_t offset = 0, int64_t pitch = 0) {
  Operand o;
  o.kind = Operand::Kind::tile;
  o.access.storage = storage;
  o.access.ndim = 2;
  o.access.offset = offset;
  o.access.dims[0] = {pitch ? pitch : columns, rows};
  o.access.dims[1] = {1, columns};
  return o;
}
Operand number(double v) {
  Operand o;
  o.kind = Operand::Kind::immediate;
  o.immediate = v;
  return o;
}
uint32_t storage(Program& p, Memory memory, int64_t rows, int64_t columns, bool external = false) {
  const bool chip = on_chip(memory);
  return p.add_storage({"t", memory, chip ? rows : 1, (chip ? 1 : rows) * columns * 4, -1, 0, external, 1});
}
Instruction& add(Program& p, Opcode opcode, std::vector<Operand> operands, AluOp op = AluOp::add) {
  Instruction in;
  in.opcode = opcode;
  in.op0 = op;
  in.operands = std::move(operands);
  if (opcode == Opcode::activation) in.reduce_cmd = ReduceCmd::reset_reduce;
  p.validate(in);
  return p.append(std::move(in));
}

void on_two_threads(int64_t n, const Range& body) {
  std::thread other([&] { body(n / 2, n); });
  body(0, n / 2);
  other.join();
}

struct Threads {
  explicit Threads(bool two) {
    if (two) set_parallel_for(on_two_threads);
  }
  ~Threads() {
    set_parallel_for([](int64_t n, const Range& body) { body(0, n); });
  }
};

}  // namespace

// A tile loop as kernels write it: load, compute, store.
TEST(a_tile_loop_becomes_parts_without_copies) {
  Program p(4);
  const int64_t rows = 128, columns = 256, tiles = 8;
  const auto in = storage(p, Memory::shared_hbm, rows * tiles, columns, true);
  const auto out = storage(p, Memory::shared_hbm, rows * tiles, columns);
  for (int64_t i = 0; i < tiles; ++i) {
    const auto t = storage(p, Memory::sbuf, rows, columns), square = storage(p, Memory::sbuf, rows, columns);
    const auto sum = storage(p, Memory::sbuf, rows, 1);
    add(p, Opcode::dma_copy, {tile(t, rows, columns), tile(in, rows, columns, i * rows * columns)});
    add(p, Opcode::activation,
        {tile(square, rows, columns), tile(t, rows, columns), number(0), number(1), tile(sum, rows, 1)});
    add(p, Opcode::tensor_scalar, {tile(t, rows, columns), tile(t, rows, columns), tile(sum, rows, 1)},
        AluOp::multiply);
    add(p, Opcode::dma_copy, {tile(out, rows, columns, i * rows * columns), tile(t, rows, columns)});
  }
  p.seal();
  const Plan& plan = p.plan();
  CHECK_EQ(plan.parts.size(), static_cast<size_t>(tiles));
  CHECK_EQ(plan.code.size(), static_cast<size_t>(2 * tiles));  // no copy is left
  for (const Instruction& i : plan.code) CHECK_EQ(i.discard, i.opcode == Opcode::activation);
  CHECK_EQ(p.instructions().size(), static_cast<size_t>(4 * tiles));  // the clock sees them all
}

// Groups of tiles that mix loads, copies, arithmetic, reductions, and stores to HBM that is read back.
TEST(random_plans_equal_a_loop_over_elements) {
  for (uint64_t seed : check::seeds(80)) {
    std::mt19937_64 r(seed);
    auto pick = [&](int64_t n) { return static_cast<int64_t>(r() % n); };
    const int64_t rows = 1 + pick(128), columns = 1 + pick(200), groups = 1 + pick(8), size = rows * columns;
    Program p(4);
    const auto in = storage(p, Memory::shared_hbm, rows * groups, columns, true);
    const auto out = storage(p, Memory::shared_hbm, rows * groups, columns);
    const auto scratch = storage(p, Memory::hbm, rows * groups, columns);
    std::vector<float> input(size * groups), output(input.size());
    for (float& v : input) v = static_cast<float>(pick(16)) - 8;
    std::vector<float> spare(input.size()), model_out(input.size()), model_spare(input.size());
    std::vector<std::vector<float>> model(groups * 3, std::vector<float>(size));
    std::vector<uint32_t> tiles(groups * 3), sums(groups);
    auto hbm = [&](uint32_t s, int64_t g) { return tile(s, rows, columns, g * size); };
    auto load = [&](int64_t t, uint32_t from, const std::vector<float>& memory, int64_t g) {
      add(p, Opcode::dma_copy, {tile(tiles[t], rows, columns), hbm(from, g)});
      std::copy_n(memory.begin() + g * size, size, model[t].begin());
    };
    auto save = [&](uint32_t to, std::vector<float>& memory, int64_t g, int64_t t) {
      add(p, Opcode::dma_copy, {hbm(to, g), tile(tiles[t], rows, columns)});
      std::copy(model[t].begin(), model[t].end(), memory.begin() + g * size);
    };
    for (int64_t g = 0; g < groups; ++g) sums[g] = storage(p, Memory::sbuf, rows, 1);
    for (int64_t t = 0; t < groups * 3; ++t) {
      tiles[t] = storage(p, Memory::sbuf, rows, columns);
      load(t, in, input, t / 3);
    }
    for (int64_t g = 0; g < groups; ++g) {
      save(scratch, model_spare, g, 3 * g);
      save(out, model_out, g, 3 * g);
    }
    for (int step = 0; step < 60; ++step) {
      const int64_t g = pick(groups), d = 3 * g + pick(3), x = 3 * g + pick(3);
      switch (pick(8)) {
        case 0:
          load(d, in, input, g);
          break;
        case 1:
          load(d, scratch, model_spare, g);
          break;
        case 2:
          save(scratch, model_spare, g, x);
          break;
        case 3:
          save(out, model_out, g, x);
          break;
        case 4: {  // all or some columns
          const int64_t width = pick(2) ? columns : 1 + pick(columns), at = pick(columns - width + 1);
          add(p, Opcode::tensor_copy,
              {tile(tiles[d], rows, width, at, columns), tile(tiles[x], rows, width, at, columns)});
          for (int64_t q = 0; q < rows; ++q)
            std::copy_n(model[x].begin() + q * columns + at, width, model[d].begin() + q * columns + at);
          break;
        }
        case 5:
          add(p, Opcode::tensor_tensor,
              {tile(tiles[d], rows, columns), tile(tiles[d], rows, columns), tile(tiles[x], rows, columns)},
              AluOp::maximum);
          for (int64_t i = 0; i < size; ++i) model[d][i] = std::max(model[d][i], model[x][i]);
          break;
        case 6: {  // d = copy of x; sum over the row; subtract the sum's half
          add(p, Opcode::activation,
              {tile(tiles[d], rows, columns), tile(tiles[x], rows, columns), number(0), number(1),
               tile(sums[g], rows, 1)});
          add(p, Opcode::tensor_scalar,
              {tile(tiles[x], rows, columns), tile(tiles[x], rows, columns), tile(sums[g], rows, 1)}, AluOp::minimum);
          const std::vector<float> before = model[x];
          for (int64_t q = 0; q < rows; ++q) {
            float sum = 0;  // of small integers: exact in any order
            for (int64_t j = 0; j < columns; ++j) sum += before[q * columns + j];
            for (int64_t j = 0; j < columns; ++j) {
              model[d][q * columns + j] = before[q * columns + j];
            }
            for (int64_t j = 0; j < columns; ++j) model[x][q * columns + j] = std::min(model[x][q * columns + j], sum);
          }
          break;
        }
        default:
          add(p, Opcode::tensor_scalar, {tile(tiles[d], rows, columns), tile(tiles[x], rows, columns), number(1)},
              AluOp::less);
          for (int64_t i = 0; i < size; ++i) model[d][i] = model[x][i] < 1 ? 1.0f : 0.0f;
      }
    }
    p.seal();
    for (bool two : {false, true}) {
      const Threads threads(two);
      std::fill(output.begin(), output.end(), -1.0f);
      Core core(p);
      core.bind(in, input.data());
      core.bind(out, output.data());
      core.bind(scratch, spare.data());
      run({&core});
      if (std::memcmp(output.data(), model_out.data(), output.size() * 4))
        check::fail(__FILE__, __LINE__, "out, seed ", seed, ", two threads: ", two);
      if (std::memcmp(spare.data(), model_spare.data(), spare.size() * 4))
        check::fail(__FILE__, __LINE__, "scratch, seed ", seed, ", two threads: ", two);
    }
  }
}

// Products whose factors come from HBM, share columns of the result's rows, and are packed once per thread.
TEST(matmul_parts_equal_a_triple_loop) {
  const int64_t k = 64, m = 96, n = 160, rows = 3, columns = 3;
  Program p(4);
  const auto a = storage(p, Memory::shared_hbm, k, m * rows, true),
             b = storage(p, Memory::shared_hbm, k, n * columns, true);
  const auto out = storage(p, Memory::shared_hbm, m * rows, n * columns);
  std::mt19937_64 r(1);
  std::vector<float> x(k * m * rows), y(k * n * columns), z(m * rows * n * columns);
  for (float& v : x) v = static_cast<float>(r() % 9) - 4;
  for (float& v : y) v = static_cast<float>(r() % 9) - 4;
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) {
      const auto left = storage(p, Memory::sbuf, k, m), right = storage(p, Memory::sbuf, k, n);
      const auto sum = storage(p, Memory::psum, m, n), c = storage(p, Memory::sbuf, m, n);
      add(p, Opcode::dma_copy, {tile(left, k, m), tile(a, k, m, i * m, m * rows)});
      add(p, Opcode::dma_copy, {tile(right, k, n), tile(b, k, n, j * n, n * columns)});
      for (int twice = 0; twice < 2; ++twice)
        add(p, Opcode::nc_matmul, {tile(sum, m, n), tile(left, k, m), tile(right, k, n)}).accumulate =
            twice ? Accumulate::add : Accumulate::overwrite;
      add(p, Opcode::tensor_copy, {tile(c, m, n), tile(sum, m, n)});
      add(p, Opcode::dma_copy, {tile(out, m, n, i * m * n * columns + j * n, n * columns), tile(c, m, n)});
    }
  p.seal();
  CHECK_EQ(p.plan().parts.size(), static_cast<size_t>(rows * columns));
  CHECK(p.plan().packs > 0);
  for (bool two : {false, true}) {
    const Threads threads(two);
    Core core(p);
    core.bind(a, x.data());
    core.bind(b, y.data());
    core.bind(out, z.data());
    run({&core});
    for (int64_t i = 0; i < m * rows; ++i)
      for (int64_t j = 0; j < n * columns; ++j) {
        float want = 0;
        for (int64_t q = 0; q < k; ++q) want += 2 * x[q * m * rows + i] * y[q * n * columns + j];
        if (z[i * n * columns + j] != want) return check::fail(__FILE__, __LINE__, "element ", i, ", ", j);
      }
  }
}
