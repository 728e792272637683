// Rule: overlap. Two places of one storage, one of them written, may share a program only if they are the same place
// or provably share no byte.
//
// Reason: a program goes through tiles in any order and in several threads. With the same place, element i is read and
// written by the same step of the same tile. With another pattern (`x[1:] += x[:-1]`) a tile would see what a
// neighbour wrote, or not, by chance.
//
// Proven are: byte ranges apart; and windows of a common period, as `chunk` makes them of the last dim.
#include <algorithm>
#include <numeric>

#include "graph.h"

namespace neuron::fusion {

bool disjoint(const Place& a, const Place& b) {
  if (a.storage != b.storage) return true;
  if (a.end_byte() <= b.begin_byte() || b.end_byte() <= a.begin_byte()) return true;
  if (a.dtype != b.dtype) return false;
  // Modulo a period that divides all larger strides, each occupies [start, start + width).
  int64_t period = 0;
  for (const Place* p : {&a, &b})
    if (p->ndim > 1) period = std::gcd(period, p->stride[0]);
  if (period <= 0) return false;
  int64_t start[2], width[2];
  for (int k = 0; k < 2; k++) {
    const Place& p = k ? b : a;
    width[k] = 1;
    for (int d = 0; d < p.ndim; d++) {
      if (p.stride[d] % period == 0) continue;
      if (p.stride[d] > period) return false;
      width[k] += (p.size[d] - 1) * p.stride[d];
    }
    start[k] = p.offset % period;
    if (start[k] + width[k] > period) return false;
  }
  return start[0] + width[0] <= start[1] || start[1] + width[1] <= start[0];
}

}  // namespace neuron::fusion
