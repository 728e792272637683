// Programs: validation, lives and capacity, initialisation, execution of random programs.
#include "program.h"

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "clock.h"
#include "error.h"
#include "executor.h"

using namespace neuron;

namespace {

struct Builder {
  Program program{4};

  uint32_t storage(Memory memory, int64_t rows, int64_t columns, bool external = false) {
    const bool chip = on_chip(memory);
    return program.add_storage({"t", memory, chip ? rows : 1, (chip ? 1 : rows) * columns * 4, -1, 0, external, 1});
  }
  static Operand tile(uint32_t storage, int64_t rows, int64_t columns, int64_t offset = 0, int64_t pitch = 0) {
    Operand o;
    o.kind = Operand::Kind::tile;
    o.access.storage = storage;
    o.access.ndim = 2;
    o.access.offset = offset;
    o.access.dims[0] = {pitch ? pitch : columns, rows};
    o.access.dims[1] = {1, columns};
    return o;
  }
  static Operand number(double v) {
    Operand o;
    o.kind = Operand::Kind::immediate;
    o.immediate = v;
    return o;
  }
  Instruction& add(Opcode opcode, std::vector<Operand> operands, AluOp op = AluOp::add, uint32_t source = 2) {
    Instruction in;
    in.opcode = opcode;
    in.op0 = op;
    in.operands = std::move(operands);
    in.source = source;
    program.validate(in);
    return program.append(std::move(in));
  }
};

void use_threads() {
  set_parallel_for([](int64_t n, const Range& body) {
    std::thread other([&] { body(n / 2, n); });
    body(0, n / 2);
    other.join();
  });
}

}  // namespace

TEST(limits_name_instruction_and_operand) {
  Builder b;
  const auto a = b.storage(Memory::sbuf, 8, 4), c = b.storage(Memory::sbuf, 8, 5);
  try {
    b.add(Opcode::tensor_copy, {Builder::tile(a, 8, 4), Builder::tile(c, 8, 5)});
    CHECK(false);
  } catch (const ValidationError& e) {
    CHECK(e.instruction == "tensor_copy" && e.operand == "src" && e.limit.find("5") != std::string::npos);
  }
  CHECK_THROWS(b.add(Opcode::tensor_copy, {Builder::tile(a, 8, 4), Builder::tile(a, 8, 4, 4)}), OutOfBounds);
}

TEST(reads_of_nothing_are_refused) {
  Builder b;
  const auto a = b.storage(Memory::sbuf, 8, 4), c = b.storage(Memory::sbuf, 8, 4);
  CHECK_THROWS(b.add(Opcode::tensor_copy, {Builder::tile(a, 8, 4), Builder::tile(c, 8, 4)}), UninitialisedRead);
  b.add(Opcode::memset, {Builder::tile(c, 8, 2, 0, 4)});
  // A copy moves what was and what was not written; what is computed from the latter is garbage until it is written.
  b.add(Opcode::tensor_copy, {Builder::tile(a, 8, 4), Builder::tile(c, 8, 4)});
  auto doubled = [&](int64_t columns) {
    b.add(Opcode::tensor_scalar,
          {Builder::tile(a, 8, columns, 0, 4), Builder::tile(a, 8, columns, 0, 4), Builder::number(2)},
          AluOp::multiply);
  };
  auto check = [&] { b.program.tracker().check_results(b.program.storages(), {a}); };
  doubled(2);
  check();
  doubled(4);
  CHECK_THROWS(check(), UninitialisedRead);
  b.add(Opcode::memset, {Builder::tile(a, 8, 2, 2, 4)});
  doubled(4);
  check();
}

TEST(capacity_counts_what_is_live_together) {
  for (bool together : {false, true}) {
    Builder b;
    std::vector<uint32_t> tiles;
    for (int i = 0; i < 5; ++i) {
      tiles.push_back(b.storage(Memory::sbuf, 128, 1000));
      b.add(Opcode::memset, {Builder::tile(tiles[i], 128, 1000)});
      if (!together)
        b.add(Opcode::tensor_copy, {Builder::tile(tiles[i], 128, 1000), Builder::tile(tiles[i], 128, 1000)});
    }
    if (together)
      for (auto t : tiles) b.add(Opcode::tensor_copy, {Builder::tile(t, 128, 1000), Builder::tile(t, 128, 1000)});
    auto check = [&] { Program::check_capacity(b.program.storages(), b.program.tracker().live(), 4 * 4000); };
    if (together)
      CHECK_THROWS(check(), CapacityError);
    else
      check();
  }
}

// Random chains on tiles with random shapes: executed in segments and on two threads, and by a loop over elements here.
TEST(random_programs_equal_a_loop_over_elements) {
  for (uint64_t seed : check::seeds(60)) {
    std::mt19937_64 r(seed);
    auto pick = [&](int64_t n) { return static_cast<int64_t>(r() % n); };
    const int64_t rows = 1 + pick(128), columns = 1 + pick(400), tiles = 3 + pick(3);
    Builder b;
    const auto in = b.storage(Memory::shared_hbm, rows * tiles, columns, true);
    const auto out = b.storage(Memory::shared_hbm, rows * tiles, columns);
    std::vector<float> input(rows * tiles * columns), output(input.size(), -1.0f);
    for (float& v : input) v = static_cast<float>(pick(64)) / 8 - 4;
    std::vector<std::vector<float>> model(tiles);
    std::vector<uint32_t> t(tiles);
    for (int64_t i = 0; i < tiles; ++i) {
      t[i] = b.storage(Memory::sbuf, rows, columns);
      b.add(Opcode::dma_copy,
            {Builder::tile(t[i], rows, columns), Builder::tile(in, rows, columns, i * rows * columns)});
      model[i].assign(input.begin() + i * rows * columns, input.begin() + (i + 1) * rows * columns);
    }
    for (int step = 0; step < 25; ++step) {
      const int64_t d = pick(tiles), x = pick(tiles), y = pick(tiles);
      static const AluOp ops[] = {AluOp::add, AluOp::subtract, AluOp::maximum, AluOp::minimum, AluOp::less};
      const AluOp op = ops[pick(5)];
      auto apply = [&](float p, float q) {
        switch (op) {
          case AluOp::add:
            return p + q;
          case AluOp::subtract:
            return p - q;
          case AluOp::maximum:
            return std::max(p, q);
          case AluOp::minimum:
            return std::min(p, q);
          default:
            return p < q ? 1.0f : 0.0f;
        }
      };
      if (pick(4) == 0) {  // a sub-block, shifted against itself
        const int64_t width = 1 + pick(columns), from = pick(columns - width + 1), to = pick(columns - width + 1);
        b.add(Opcode::tensor_copy,
              {Builder::tile(t[d], rows, width, to, columns), Builder::tile(t[x], rows, width, from, columns)});
        const auto before = model[x];
        for (int64_t p = 0; p < rows; ++p)
          for (int64_t j = 0; j < width; ++j) model[d][p * columns + to + j] = before[p * columns + from + j];
      } else if (pick(2)) {
        const double s = static_cast<double>(pick(9) - 4);
        b.add(Opcode::tensor_scalar,
              {Builder::tile(t[d], rows, columns), Builder::tile(t[x], rows, columns), Builder::number(s)}, op);
        for (size_t i = 0; i < model[d].size(); ++i) model[d][i] = apply(model[x][i], static_cast<float>(s));
      } else {
        b.add(Opcode::tensor_tensor,
              {Builder::tile(t[d], rows, columns), Builder::tile(t[x], rows, columns),
               Builder::tile(t[y], rows, columns)},
              op);
        for (size_t i = 0; i < model[d].size(); ++i) model[d][i] = apply(model[x][i], model[y][i]);
      }
    }
    for (int64_t i = 0; i < tiles; ++i)
      b.add(Opcode::dma_copy,
            {Builder::tile(out, rows, columns, i * rows * columns), Builder::tile(t[i], rows, columns)});
    b.program.seal();
    for (bool threads : {false, true}) {
      if (threads) use_threads();
      Core core(b.program);
      core.bind(in, input.data());
      core.bind(out, output.data());
      run({&core});
      for (int64_t i = 0; i < tiles; ++i)
        if (std::memcmp(output.data() + i * rows * columns, model[i].data(), model[i].size() * 4))
          check::fail(__FILE__, __LINE__, "seed ", seed, ", tile ", i, ", threads ", threads);
    }
    set_parallel_for([](int64_t n, const Range& body) { body(0, n); });
  }
}

TEST(the_clock_keeps_order_and_overlaps_engines) {
  Builder b;
  const auto h = b.storage(Memory::shared_hbm, 128, 512, true);
  const auto t = b.storage(Memory::sbuf, 128, 512), u = b.storage(Memory::sbuf, 128, 512);
  b.add(Opcode::dma_copy, {Builder::tile(t, 128, 512), Builder::tile(h, 128, 512)});
  b.add(Opcode::memset, {Builder::tile(u, 128, 512)});
  b.add(Opcode::tensor_tensor, {Builder::tile(t, 128, 512), Builder::tile(t, 128, 512), Builder::tile(u, 128, 512)});
  b.program.seal();
  Target target;
  target.clock_ghz.fill(1.0);
  target.dma_bytes_per_ns = 20;
  target.dma_row_ns = 100;
  target.dma_start_ns = 1300;
  const Timeline line = predict(b.program, target);
  CHECK_EQ(line.events.size(), size_t{3});
  CHECK(line.events[1].start_ns < line.events[0].end_ns);   // memset does not wait for the DMA
  CHECK(line.events[2].start_ns >= line.events[0].end_ns);  // the sum does
  CHECK_EQ(line.events[2].waits_for, 0);
  CHECK_EQ(line.events[2].end_ns - line.events[2].start_ns, 1024.0);  // two inputs of 512 fp32 elements
  CHECK_EQ(line.latency_ns, line.events[2].end_ns);
  const double rows = 128.0 / 16 * (2048 / 20.0);  // 8 rows of 2 KiB on each of 16 engines
  CHECK(std::fabs(line.events[0].end_ns - 1300 - rows) < 1);
}

namespace {

Instruction loop(Opcode opcode, int reg, Bound start = {}, Bound stop = {}) {
  Instruction in;
  in.opcode = opcode;
  in.reg = reg;
  in.start = start;
  in.stop = stop;
  in.step.value = 1;
  return in;
}

// A kernel that adds 1 to a tile in a device loop of so many trips, the number by registers: stop = 2 * a + b.
struct Counter {
  Builder b;
  uint32_t out, t;
  Counter(int64_t a, int64_t extra, bool clear = true) {
    out = b.storage(Memory::shared_hbm, 1, 4, true);
    t = b.storage(Memory::sbuf, 1, 4);
    const int x = b.program.add_register(), y = b.program.add_register(), sum = b.program.add_register(),
              i = b.program.add_register();
    b.program.append(loop(Opcode::register_move, x, {-1, a}));
    b.program.append(loop(Opcode::register_move, y, {-1, extra}));
    b.program.append(loop(Opcode::register_move, sum, {x, 0, 2}, {y, 0}));
    if (clear) b.add(Opcode::memset, {Builder::tile(t, 1, 4)});
    b.program.append(loop(Opcode::loop_begin, i, {}, {sum}));
    if (clear)
      b.add(Opcode::tensor_scalar, {Builder::tile(t, 1, 4), Builder::tile(t, 1, 4), Builder::number(1)});
    else
      b.add(Opcode::memset, {Builder::tile(t, 1, 4)});
    b.program.append(loop(Opcode::loop_end, i));
    b.add(Opcode::dma_copy, {Builder::tile(out, 1, 4), Builder::tile(t, 1, 4)});
    b.program.seal();
  }
  float run() {
    std::array<float, 4> memory{};
    Core core(b.program);
    core.bind(out, memory.data());
    core.run();
    return memory[3];
  }
};

}  // namespace

TEST(loops_run_as_often_as_registers_say) {
  CHECK_EQ(Counter(3, 4).run(), 10.0f);
  CHECK_EQ(Counter(-1, 2).run(), 0.0f);
  const Timeline line = predict(Counter(3, 4).b.program, Target());
  CHECK_EQ(line.events.size(), size_t{12});  // memset, 10 sums, copy
  CHECK(line.loops.empty());
}

TEST(the_clock_extrapolates_long_loops) {
  Target target;
  target.clock_ghz.fill(1.0);
  target.access_cycles = 0;
  target.dma_bytes_per_ns = 20;
  const Timeline line = predict(Counter(50000, 0).b.program, target);
  CHECK(line.events.size() < 10000);
  int64_t sums = 0;
  for (const Event& e : line.events) sums += e.times;
  CHECK_EQ(sums, 100002);
  CHECK_EQ(line.loops.size(), size_t{1});
  CHECK_EQ(line.loops[0].trips, 100000);
  CHECK(std::fabs(line.latency_ns / 100000 - 64) < 1);  // one after the other, at least 64 cycles each
}

TEST(a_loop_without_a_trip_writes_nothing) {
  CHECK_EQ(Counter(1, 0, false).run(), 0.0f);
  CHECK_THROWS(Counter(0, 0, false).run(), UninitialisedRead);
}

TEST(indices_are_checked) {
  Builder b;
  const auto h = b.storage(Memory::shared_hbm, 8, 4, true), t = b.storage(Memory::sbuf, 8, 4);
  const auto i = b.storage(Memory::sbuf, 4, 1), f = b.storage(Memory::sbuf, 8, 1);
  const auto rows = [&](uint32_t storage, int64_t n, Dtype dtype) {
    Operand o = Builder::tile(h, 8, 4);
    o.access.indexing = Access::Indexing::rows;
    o.access.index_stride = 4;
    o.access.index_limit = 8;
    auto index = std::make_shared<Access>(Builder::tile(storage, n, 1).access);
    index->dtype = dtype;
    o.access.index = index;
    return o;
  };
  const auto copy = [&](Operand from) { b.add(Opcode::dma_copy, {Builder::tile(t, 8, 4), std::move(from)}); };
  CHECK_THROWS(copy(rows(f, 8, Dtype::float32)), ValidationError);  // no integers
  CHECK_THROWS(copy(rows(i, 4, Dtype::int32)), ValidationError);    // too few
  CHECK_THROWS(copy(rows(i, 8, Dtype::int32)), OutOfBounds);        // beyond their buffer
  Operand far = Builder::tile(h, 8, 4);
  far.access.offset = int64_t{1} << 62;
  CHECK_THROWS(copy(far), ValidationError);
}
