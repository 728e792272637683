// The instruction table is consistent with itself.
#include "isa.h"

#include <set>
#include <string>

#include "check.h"

using namespace neuron;

TEST(every_opcode_has_its_row) {
  CHECK_EQ(all_instructions().size(), static_cast<size_t>(kOpcodes));
  std::set<std::string_view> names;
  for (int i = 0; i < kOpcodes; ++i) {
    const InstructionSpec& s = spec(static_cast<Opcode>(i));
    CHECK_EQ(static_cast<int>(s.opcode), i);
    CHECK(names.insert(s.name).second);
    CHECK(s.engines >> static_cast<int>(s.prefer) & 1);
    CHECK(s.min_generation >= 2 && s.min_generation <= 4);
    CHECK(!s.costs.empty() && s.costs.back().conditions == 0 && s.costs.back().since <= s.min_generation);
    for (const Cost& c : s.costs) CHECK(!c.source.empty() && c.per_element > 0);
    std::set<std::string_view> operands;
    for (const OperandSpec& o : s.operands) {
      CHECK(operands.insert(o.name).second);
      CHECK(o.memories != 0 && o.types != 0 && o.max_free > 0);
    }
  }
}

TEST(tables_follow_their_enumerations) {
  CHECK(info(AluOp::add).name == "add" && info(AluOp::average).name == "average");
  CHECK(info(AluOp::invert).inputs == 1 && info(AluOp::invert).cls == AluClass::bitwise);
  CHECK(kFunctionTable[static_cast<int>(Function::exp)].name == "exp");
  CHECK(info(Dtype::float4_e2m1fn_x4).name == "float4_e2m1fn_x4" && size_of(Dtype::float4_e2m1fn_x4) == 2);
  CHECK(info(Dtype::bfloat16).name == "bfloat16" && size_of(Dtype::float8_e5m2_x4) == 4);
}
