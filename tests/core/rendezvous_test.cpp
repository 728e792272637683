// Where cores meet: who goes on, and what is refused rather than waited for.
#include <deque>

#include "check.h"
#include "error.h"
#include "executor.h"

using namespace neuron;

namespace {

struct Ranks {
  Program program{4};
  uint32_t source, result;
  std::vector<float> from[2] = {{1, 2}, {10, 20}}, to[2] = {{0, 0}, {0, 0}};
  std::deque<Core> cores;
  std::vector<Instruction> at;

  explicit Ranks(bool one_rank) : at(2) {
    source = program.add_storage({"source", Memory::shared_hbm, 1, 8, -1, 0, true, 1});
    result = program.add_storage({"result", Memory::shared_hbm, 1, 8, -1, 0, true, 1});
    for (int i = 0; i < 2; ++i) {
      Core& core = cores.emplace_back(program, one_rank ? i : 0, one_rank ? 0 : i);
      core.bind(source, from[i].data());
      core.bind(result, to[i].data());
    }
  }
  static Operand tensor(uint32_t storage) {
    Operand o;
    o.kind = Operand::Kind::tile;
    o.access.storage = storage;
    o.access.ndim = 1;
    o.access.dims[0] = {1, 2};
    return o;
  }
  void wait(int i, Opcode opcode, std::vector<int64_t> list) {
    at[i] = {};
    at[i].opcode = opcode;
    at[i].op0 = AluOp::add;
    at[i].list = std::move(list);
    at[i].source = 7;
    at[i].operands = {tensor(result), tensor(source), {}};
  }
  std::vector<bool> meet() {
    std::vector<Core*> all{&cores[0], &cores[1]};
    std::vector<bool> released;
    const bool progress = rendezvous(all, {&at[0], &at[1]}, released);
    CHECK_EQ(progress, released[0] || released[1]);
    return released;
  }
};

}  // namespace

TEST(a_barrier_of_nobody_is_refused) {
  for (std::vector<int64_t> list : {std::vector<int64_t>{}, {1}}) {
    Ranks r(true);
    r.wait(0, Opcode::core_barrier, list);
    r.wait(1, Opcode::core_barrier, {0, 1});
    CHECK_THROWS(r.meet(), ValidationError);
  }
}

TEST(a_core_alone_does_not_release_one_that_waits_for_it) {
  Ranks r(true);
  r.wait(0, Opcode::core_barrier, {0, 1});
  r.wait(1, Opcode::core_barrier, {1});
  const auto released = r.meet();
  CHECK(!released[0] && released[1]);
}

TEST(a_collective_of_nobody_is_refused) {
  for (Opcode opcode : {Opcode::collective_permute, Opcode::all_reduce}) {
    Ranks r(false);
    r.wait(0, opcode, {});
    r.wait(1, opcode, {});
    CHECK_THROWS(r.meet(), ValidationError);
  }
}

TEST(ranks_that_meet_agree) {
  Ranks r(false);
  r.wait(0, Opcode::all_reduce, {0, 1});
  r.wait(1, Opcode::all_reduce, {0, 1});
  CHECK(r.meet() == std::vector<bool>({true, true}));
  CHECK_EQ(r.to[0][1], 22);
  r.at[1].op0 = AluOp::maximum;
  try {
    r.meet();
    CHECK(false);
  } catch (const ValidationError& e) {
    CHECK_EQ(e.operand, "op");
    CHECK(std::string(e.what()).ends_with(" (@7)"));
  }
}

TEST(metadata_of_another_size_is_refused) {
  Ranks r(false);
  for (int i = 0; i < 2; ++i) {
    r.wait(i, Opcode::all_gather_v, {0, 1});
    r.at[i].operands[2] = Ranks::tensor(r.result);
  }
  CHECK_THROWS(r.meet(), ValidationError);
}
