// Writes x86-64 machine code: the AVX-512 instructions on 32-bit lanes that loops need, and what a loop is made of.
// Encodings are those of the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, 2.7 (EVEX).
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace neuron::x86 {

enum Gpr : uint8_t { rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15 };
using Zmm = uint8_t;   // 0 to 31
using Mask = uint8_t;  // 1 to 7; 0: no mask

// A place in memory: [base + index * scale + offset], or an offset in the code itself.
struct Address {
  Gpr base;
  Gpr index = rsp;  // rsp: none
  uint8_t scale = 1;
  int32_t offset = 0;
  bool in_code = false;
};
inline Address in_code(int32_t offset) { return {rbp, rsp, 1, offset, true}; }

// An EVEX instruction: opcode map (1: 0F, 2: 0F38, 3: 0F3A), prefix (0: none, 1: 66, 2: F3, 3: F2), opcode.
struct Op {
  uint8_t map, prefix, opcode;
};
// clang-format off
inline constexpr Op
    vmovups{1, 0, 0x10}, vmovups_store{1, 0, 0x11}, vbroadcastss{2, 1, 0x18},
    vaddps{1, 0, 0x58}, vmulps{1, 0, 0x59}, vsubps{1, 0, 0x5c}, vminps{1, 0, 0x5d}, vdivps{1, 0, 0x5e},
    vmaxps{1, 0, 0x5f}, vsqrtps{1, 0, 0x51}, vrndscaleps{3, 1, 0x08}, vcmpps{1, 0, 0xc2},
    vcvtdq2ps{1, 0, 0x5b}, vcvttps2dq{1, 2, 0x5b}, vcvtph2ps{2, 1, 0x13}, vcvtps2ph{3, 1, 0x1d},
    vpandd{1, 1, 0xdb}, vpord{1, 1, 0xeb}, vpxord{1, 1, 0xef}, vpternlogd{3, 1, 0x25},
    vpaddd{1, 1, 0xfe}, vpsubd{1, 1, 0xfa}, vpmulld{2, 1, 0x40}, vpmaxsd{2, 1, 0x3d}, vpminsd{2, 1, 0x39},
    vpabsd{2, 1, 0x1e}, vpcmpd{3, 1, 0x1f}, vptestmd{2, 1, 0x27}, vptestnmd{2, 2, 0x27}, vpmovm2d{2, 2, 0x38},
    vblendmps{2, 1, 0x65}, vpslld_psrld_psrad{1, 1, 0x72},
    vpmovzxwd{2, 1, 0x33}, vpmovzxbd{2, 1, 0x31}, vpmovsxbd{2, 1, 0x21}, vpmovdw{2, 2, 0x33}, vpmovdb{2, 2, 0x31};
// clang-format on
enum Shift : uint8_t { shift_right = 2, shift_right_signed = 4, shift_left = 6 };
enum Condition : uint8_t { below = 0x2, equal = 0x4, not_equal = 0x5 };

class Assembler {
 public:
  const std::vector<uint8_t>& code() const { return code_; }
  int32_t here() const { return static_cast<int32_t>(code_.size()); }
  void word(uint32_t w) { bytes(&w, 4); }  // data

  // reg = op(first, second); `mask` chooses the lanes that are written, `zero` clears the others. For instructions of
  // one input, `first` is 0. The result is a mask register for comparisons and tests.
  void v(Op op, uint8_t reg, Zmm first, Zmm second, Mask mask = 0, bool zero = false) {
    evex(op, reg, first, mask, zero, false, !(second & 8), !(second & 16));
    byte(static_cast<uint8_t>(0xc0 | (reg & 7) << 3 | (second & 7)));
  }
  // The same with a memory operand; `repeat`: one element, for all lanes.
  void v(Op op, uint8_t reg, Zmm first, const Address& m, Mask mask = 0, bool zero = false, bool repeat = false) {
    evex(op, reg, first, mask, zero, repeat, !(m.base & 8), !(m.index & 8));
    address(reg & 7, m);
  }
  void v_immediate(Op op, uint8_t reg, Zmm first, Zmm second, uint8_t n) {
    v(op, reg, first, second);
    byte(n);
  }
  void store(Op op, const Address& m, Zmm reg, Mask mask = 0) { v(op, reg, 0, m, mask); }
  void store_immediate(Op op, const Address& m, Zmm reg, uint8_t n, Mask mask = 0) {
    v(op, reg, 0, m, mask);
    byte(n);
  }
  void shift(Shift kind, Zmm to, Zmm from, uint8_t bits) { v_immediate(vpslld_psrld_psrad, kind, to, from, bits); }

  void load(Gpr to, const Address& m) { memory(0x8b, to, m); }  // 64 bits
  void store(const Address& m, Gpr from) { memory(0x89, from, m); }
  void add(const Address& m, Gpr from) { memory(0x01, from, m); }
  void load_address(Gpr to, const Address& m) { memory(0x8d, to, m); }
  void load_mask(Mask to, const Address& m) {  // kmovw, 16 bits
    byte(0xc4);
    byte(static_cast<uint8_t>(0xc1 | (m.base & 8 ? 0 : 0x20)));
    byte(0x78);
    byte(0x90);
    address(to, m);
  }
  void move(Gpr to, Gpr from) { reg_reg(0x89, from, to); }
  void clear(Gpr r) { reg_reg(0x31, r, r); }
  void add(Gpr to, int32_t n) { immediate(0, to, n); }
  void align_down(Gpr to, int32_t n) { immediate(4, to, -n); }
  void compare(Gpr a, Gpr b) { reg_reg(0x39, b, a); }  // a - b
  void test(Gpr r) { reg_reg(0x85, r, r); }
  void push(Gpr r) {
    if (r & 8) byte(0x41);
    byte(static_cast<uint8_t>(0x50 | (r & 7)));
  }
  void pop(Gpr r) {
    if (r & 8) byte(0x41);
    byte(static_cast<uint8_t>(0x58 | (r & 7)));
  }
  void call(void (*function)(void*, const void*, const void*, const void*)) {  // through rax
    const auto at = reinterpret_cast<uint64_t>(function);
    byte(0x48);
    byte(0xb8);
    bytes(&at, 8);
    byte(0xff);
    byte(0xd0);
  }
  void zero_upper() {
    for (uint8_t b : {0xc5, 0xf8, 0x77}) byte(b);
  }
  void ret() { byte(0xc3); }
  void jump(Condition c, int32_t to) {
    byte(0x0f);
    byte(static_cast<uint8_t>(0x80 | c));
    word(static_cast<uint32_t>(to - (here() + 4)));
  }
  int32_t jump_ahead(Condition c) {  // to a place that land() gives
    jump(c, 0);
    return here();
  }
  void land(int32_t jump) {
    const int32_t distance = here() - jump;
    std::memcpy(code_.data() + jump - 4, &distance, 4);
  }

 private:
  void byte(uint8_t b) { code_.push_back(b); }
  void bytes(const void* p, size_t n) {
    const auto* b = static_cast<const uint8_t*>(p);
    code_.insert(code_.end(), b, b + n);
  }
  void evex(Op op, uint8_t reg, Zmm first, Mask mask, bool zero, bool repeat, bool not_b, bool not_x) {
    byte(0x62);
    byte(static_cast<uint8_t>(!(reg & 8) << 7 | not_x << 6 | not_b << 5 | !(reg & 16) << 4 | op.map));
    byte(static_cast<uint8_t>((~first & 15) << 3 | 4 | op.prefix));  // W = 0
    byte(static_cast<uint8_t>(zero << 7 | 2 << 5 | repeat << 4 | !(first & 16) << 3 | mask));
    byte(op.opcode);
  }
  // ModRM, SIB and a 32-bit offset.
  void address(int reg, const Address& m) {
    if (m.in_code) {
      byte(static_cast<uint8_t>(reg << 3 | 5));
      return word(static_cast<uint32_t>(m.offset - (here() + 4)));
    }
    if (m.index == rsp && (m.base & 7) != rsp) {
      byte(static_cast<uint8_t>(0x80 | reg << 3 | (m.base & 7)));
    } else {
      const int scale = m.scale == 4 ? 2 : m.scale == 2 ? 1 : 0;
      byte(static_cast<uint8_t>(0x80 | reg << 3 | 4));
      byte(static_cast<uint8_t>(scale << 6 | (m.index & 7) << 3 | (m.base & 7)));
    }
    word(static_cast<uint32_t>(m.offset));
  }
  void memory(uint8_t opcode, Gpr reg, const Address& m) {
    byte(static_cast<uint8_t>(0x48 | (reg >> 3) << 2 | (m.index >> 3) << 1 | m.base >> 3));
    byte(opcode);
    address(reg & 7, m);
  }
  void reg_reg(uint8_t opcode, Gpr reg, Gpr rm) {
    byte(static_cast<uint8_t>(0x48 | (reg >> 3) << 2 | rm >> 3));
    byte(opcode);
    byte(static_cast<uint8_t>(0xc0 | (reg & 7) << 3 | (rm & 7)));
  }
  void immediate(int extension, Gpr r, int32_t n) {
    byte(static_cast<uint8_t>(0x48 | r >> 3));
    byte(0x81);
    byte(static_cast<uint8_t>(0xc0 | extension << 3 | (r & 7)));
    word(static_cast<uint32_t>(n));
  }

  std::vector<uint8_t> code_;
};

}  // namespace neuron::x86
