#include "graph.h"

#include <algorithm>

namespace neuron::fusion {

bool Place::operator==(const Place& o) const {
  return storage == o.storage && dtype == o.dtype && ndim == o.ndim && offset == o.offset &&
         std::equal(size, size + ndim, o.size) && std::equal(stride, stride + ndim, o.stride);
}

int64_t Place::begin_byte() const { return offset * size_of(dtype); }
int64_t Place::end_byte() const {
  int64_t last = offset;
  for (int d = 0; d < ndim; d++) last += (size[d] - 1) * stride[d];
  return (last + 1) * size_of(dtype);
}

uint16_t Graph::intern(std::span<const Place> members) {
  for (const Place& p : members)
    if (p.storage >= first_touch.size()) first_touch.resize(p.storage + 1, kNoTouch);
  for (uint32_t t = first_touch[members[0].storage]; t != kNoTouch; t = touches[t].next) {
    const Operand& o = operands[touches[t].operand];
    if (touches[t].member == 0 && o.members == members.size() &&
        std::equal(members.begin(), members.end(), places.begin() + o.first))
      return touches[t].operand;
  }
  const auto id = static_cast<uint16_t>(operands.size());
  operands.push_back({static_cast<uint32_t>(places.size()), static_cast<uint16_t>(members.size()), kNone, 1});
  // Part of the signature: types, storages, and which earlier places of the storage it may overlap.
  for (size_t i = 0; i < members.size(); i++) {
    const Place& p = members[i];
    signature.push_back(0x40000000u | static_cast<uint32_t>(p.storage) << 8 | static_cast<uint32_t>(p.dtype));
    for (uint32_t t = first_touch[p.storage]; t != kNoTouch; t = touches[t].next)
      signature.push_back(disjoint(place(touches[t].operand, touches[t].member), p));
    touches.push_back({id, static_cast<uint16_t>(i), first_touch[p.storage]});
    first_touch[p.storage] = static_cast<uint32_t>(touches.size() - 1);
    places.push_back(p);
  }
  const Place p = members[0];
  if (members.size() == 1 && p.ndim > 0 && p.stride[p.ndim - 1] == 0) {
    Place row = p;
    row.ndim--;
    const uint16_t r = intern({&row, 1});
    operands[id].row = r;
    operands[id].repeats = p.size[p.ndim - 1];
    signature.push_back(0x50000000u | r);
    signature.push_back(intern_length(operands[id].repeats));
  }
  return id;
}

uint16_t Graph::intern_space(std::span<const int64_t> members) {
  for (size_t i = 0; i < spaces.size(); i++)
    if (spaces[i].members == members.size() &&
        std::equal(members.begin(), members.end(), counts.begin() + spaces[i].first))
      return static_cast<uint16_t>(i);
  spaces.push_back({static_cast<uint32_t>(counts.size()), static_cast<uint16_t>(members.size())});
  counts.insert(counts.end(), members.begin(), members.end());
  return static_cast<uint16_t>(spaces.size() - 1);
}

uint16_t Graph::intern_length(int64_t length) {
  const auto it = std::find(lengths.begin(), lengths.end(), length);
  if (it != lengths.end()) return static_cast<uint16_t>(it - lengths.begin());
  lengths.push_back(length);
  return static_cast<uint16_t>(lengths.size() - 1);
}

void Graph::append(const Node& node, std::span<const uint32_t> numbers) {
  nodes.push_back(node);
  nodes.back().first_scalar = static_cast<uint32_t>(scalars.size());
  scalars.insert(scalars.end(), numbers.begin(), numbers.end());
  const auto row = reinterpret_cast<uintptr_t>(node.row);
  signature.push_back(static_cast<uint32_t>(row));
  signature.push_back(static_cast<uint32_t>(row >> 32) << 16 | static_cast<uint32_t>(node.compute) << 8 |
                      static_cast<uint32_t>(node.result));
  signature.push_back(static_cast<uint32_t>(node.space) << 16 | node.row_space);
  signature.push_back(static_cast<uint32_t>(spaces[node.space].members) << 16 | node.numbers << 8 | node.scalars);
  if (node.reduces) {
    signature.push_back(intern_length(columns(node)));
    signature.push_back(columns(node) > kMaxResidentCols);
  }
  for (int i = 0; i < node.inputs; i++) signature.push_back(node.in[i]);
  for (int i = 0; i < node.outputs; i++) signature.push_back(0x80000000u | node.out[i]);
}

int64_t Graph::columns(const Node& node) const {
  return node.reduces ? counts[spaces[node.space].first] / counts[spaces[node.row_space].first] : 1;
}

bool Graph::apart(uint16_t a, uint16_t b) const {
  for (int i = 0; i < operands[a].members; i++) {
    const Place& p = place(a, i);
    for (uint32_t t = first_touch[p.storage]; t != kNoTouch; t = touches[t].next)
      if (touches[t].operand == b && !disjoint(p, place(b, touches[t].member))) return false;
  }
  return true;
}

void Graph::clear() {
  places.clear();
  operands.clear();
  nodes.clear();
  scalars.clear();
  counts.clear();
  spaces.clear();
  lengths.clear();
  touches.clear();
  first_touch.clear();
  signature.clear();
}

}  // namespace neuron::fusion
