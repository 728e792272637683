// How lane operations are written as instructions: one recipe each. A result has the bits that the operation's kernel
// gives (simd/lanes.cpp).
#pragma once
#include <cstdint>

#include "../dtype.h"
#include "../lane_ops.h"
#include "assembler.h"

namespace neuron::x86 {

enum class Form : uint8_t {
  none,    // neither an instruction nor a function
  call,    // a function of simd/lanes.cpp
  binary,  // one instruction of two inputs
  merged,  // two instructions: the second one's inputs are the first one's result and c, in this order or swapped
  swapped,
  compare,  // of floats by vcmpps, of integers by vpcmpd; `detail` is the predicate
  icompare,
  extreme,  // vmaxps or vminps, where a NaN in input `detail` is handed on or ignored
  unary,    // one instruction of one input
  rounding,
  other,  // by its own lines
};
struct Recipe {
  Form form = Form::call;
  Op op{}, second{};
  uint8_t detail = 0;
  // Whether inputs may be loose, and whether the result is: always, or if an input is.
  enum Loose : uint8_t { exact, takes, follows, gives } loose = exact;
};

const Recipe& recipe_of(LaneOp op);

// Registers that recipes use: zmm0 to zmm3 are for what comes between, mask 1 chooses lanes.
inline constexpr int kTemporaries = 4;
inline constexpr Mask kChosen = 1;

// Words that recipes need stand at the start of the code, in this order.
enum Word {
  one_nan,
  sign_bit,
  magnitude_bits,
  one,
  one_float,
  infinity,
  half_less,
  quiet_bit,
  high_half,
  low_byte,
  kWords
};
inline constexpr uint32_t kWordBits[kWords] = {0x7fc00000, 0x80000000, 0x7fffffff, 1,          0x3f800000,
                                               0x7f800000, 0x7fff,     0x400000,   0xffff0000, 0xff};
inline Address word_at(Word w) { return in_code(4 * w); }

// to = op(in). `to` may be one of the inputs. Not for calls.
void write(Assembler& a, LaneOp op, Zmm to, const Zmm (&in)[3]);
// Gives all NaNs of a register the bits of the one that arithmetic gives.
void settle(Assembler& a, Zmm lanes);
// Elements of a type narrower than a lane, into and out of registers.
void load_narrow(Assembler& a, Dtype from, Zmm to, const Address& m, Mask mask);
void store_narrow(Assembler& a, Dtype to, const Address& m, Zmm lanes, Mask mask);

}  // namespace neuron::x86
