// Races between the cores of a launch: accesses to the same bytes of HBM, one of them a write, that nothing orders.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "isa.h"

namespace neuron {

struct Access;
struct Instruction;
struct Storage;

// What a core does to HBM that other cores see, in epochs: stretches between its meetings with them.
class SharedUses {
 public:
  struct Use {
    uint32_t storage, source;
    Opcode opcode;
    bool write;
    int64_t begin, end;                             // bytes that it lies within
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size) in bytes, outermost first; the last is one run
  };
  void follow() { on_ = true; }
  // Places known only when the program runs are left out; so is all if the core meets others in a loop.
  void visit(const std::vector<Storage>& storages, const Instruction& instruction, bool in_loop);
  const std::vector<std::vector<Use>>& epochs() const { return epochs_; }

 private:
  bool on_ = false, loops_ = false;
  std::vector<std::vector<Use>> epochs_{1};
};

struct Race {
  SharedUses::Use first, second;  // of core a, of core b
  int64_t byte;                   // the first that both touch
};
// The first race of two cores. same: storages of a and of b that are one memory.
std::optional<Race> find_race(const SharedUses& a, const SharedUses& b,
                              const std::vector<std::pair<uint32_t, uint32_t>>& same);

}  // namespace neuron
