// What the recorder writes and the fuser reads: operator calls as nodes on places in memory. No tensors, no torch.
//
// A place is a regular pattern of elements in a storage. Its dims go from slow to fast in the order in which the node
// walks through its elements, merged as far as strides allow, without dims of one element: two places are the same
// function from element number to address exactly if they are equal. An operand is a place, or a list of places for
// operators on lists of tensors (one for each member).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/tile_program.h"

namespace neuron::fusion {

inline constexpr uint16_t kNone = 0xffff;
inline constexpr int kMaxInputs = 8, kMaxOutputs = 5;

struct Place {
  uint16_t storage = 0;
  Dtype dtype = Dtype::float32;
  uint8_t ndim = 0;
  int64_t offset = 0;  // elements
  int64_t size[kTileDims], stride[kTileDims];
  bool operator==(const Place& o) const;
  // First and one past the last byte of the storage that it can touch.
  int64_t begin_byte() const;
  int64_t end_byte() const;
};

// Whether two places of one storage provably share no byte.
bool disjoint(const Place& a, const Place& b);

struct Row;

struct Operand {
  uint32_t first;  // index of the first member's place
  uint16_t members;
  uint16_t row;     // of a place that repeats along its fastest dim: the operand of what is repeated
  int64_t repeats;  // length of that dim
};

// That a member of an operand lies in a storage; a chain for each storage.
struct Touch {
  uint16_t operand, member;
  uint32_t next;
};
inline constexpr uint32_t kNoTouch = 0xffffffff;

struct Node {
  const Row* row;
  Dtype compute;  // type in which inputs meet
  Dtype result;   // type of the results before they are stored
  uint8_t inputs, outputs, scalars;
  uint8_t numbers;  // tensor arguments that are numbers on the host (bit i: argument i); they are the first scalars
  bool reduces;
  uint16_t in[kMaxInputs], out[kMaxOutputs];
  uint16_t space;      // number of this space in Graph::spaces
  uint16_t row_space;  // of a reduction: the space of its results
  uint32_t first_scalar;
};

// Element counts of the members of a node.
struct Space {
  uint32_t first;  // index into Graph::counts
  uint16_t members;
};

class Graph {
 public:
  // Numbers the operand of these places; equal ones have one number. `storage` ids are the caller's.
  uint16_t intern(std::span<const Place> members);
  uint16_t intern_space(std::span<const int64_t> counts);
  // Numbers a count of columns.
  uint16_t intern_length(int64_t length);
  // Appends a node; `scalars` are member by member.
  void append(const Node& node, std::span<const uint32_t> scalars);
  void clear();

  // Length of what a reducing node reduces; 1 for others.
  int64_t columns(const Node& node) const;
  // Whether the members of one operand provably share no byte with those of the other.
  bool apart(uint16_t a, uint16_t b) const;
  const Place& place(uint16_t operand, int member = 0) const { return places[operands[operand].first + member]; }

  std::vector<Place> places;
  std::vector<Operand> operands;
  std::vector<Node> nodes;
  std::vector<uint32_t> scalars;
  std::vector<int64_t> counts;
  std::vector<Space> spaces;
  std::vector<int64_t> lengths;
  std::vector<Touch> touches;
  std::vector<uint32_t> first_touch;  // of each storage
  std::vector<uint32_t> signature;    // everything the fuser's decisions depend on, save liveness
};

}  // namespace neuron::fusion
