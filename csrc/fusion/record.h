// From a call of an ATen operator to a node: which calls are fusible, what their results look like, where their
// operands lie. Everything is decided at the call, from metadata; what is out of the ordinary is left to the library
// path, which also words the errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <initializer_list>
#include <optional>

#include "aten/op_table.h"
#include "rows.h"

namespace neuron {
class NeuronGenerator;
}

namespace neuron::fusion {

using at::Tensor;

// The lane type of a tensor type, if programs have it.
std::optional<Dtype> dtype_of(c10::ScalarType type);

// A number as a lane of a compute type; none if the type cannot hold it.
std::optional<uint32_t> lane_of(const c10::Scalar& s, Dtype compute);
// The number that a CPU tensor without dimensions holds.
std::optional<c10::Scalar> host_number(const Tensor& t);
// How often this thread asked for one. Who records operators to run what they recorded again learns from it whether a
// number went anywhere but into the nodes (Window::Batch::hosted).
inline thread_local uint64_t t_host_numbers = 0;

struct Call {
  const Row& row;
  OpCounter& counter;
  c10::ScalarType compute;                    // in which inputs meet
  c10::ScalarType result;                     // of new tensors, and before the results are stored
  c10::SmallVector<const Tensor*, 4> inputs;  // on the device
  c10::SmallVector<uint32_t, 4> scalars;      // first those of `numbers`
  uint8_t numbers = 0;                        // tensor arguments that are numbers, as bits
  Tensor* second = nullptr;                   // a second new result, laid out like the first
  c10::ScalarType second_type = c10::ScalarType::Undefined;
  bool counted = true;                          // the node is the first of its operator
  NeuronGenerator* generator = nullptr;         // whose seed and offset are the first four scalars
  uint64_t counters = 0;                        // that were reserved there
  c10::SmallVector<const Tensor*, 2> hosted{};  // tensor arguments that are numbers
};

// Records a call whose result has the broadcast shape of its inputs. `out`: where to write, or undefined: then it
// becomes a new tensor. False: not fusible; nothing has happened.
bool record_pointwise(const Call& call, Tensor& out);

// Records a copy between tensors of one device, with conversion and expansion. False: not fusible.
bool record_copy(const Tensor& from, Tensor to);

// Whether programs can work on this tensor.
bool usable(const Tensor& t);

}  // namespace neuron::fusion
