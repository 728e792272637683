// Errors of kernels. Each knows what it is about; the location is added by whoever knows the kernel's lines.
#pragma once
#include <stdexcept>
#include <string>

namespace neuron {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A limit of the hardware is violated.
struct ValidationError : Error {
  ValidationError(std::string instruction_, std::string operand_, std::string limit_)
      : Error(instruction_ + (operand_.empty() ? "" : " " + operand_) + " " + limit_),
        instruction(std::move(instruction_)),
        operand(std::move(operand_)),
        limit(std::move(limit_)) {}
  std::string instruction, operand, limit;
};
struct OutOfBounds : Error {
  using Error::Error;
};
struct UninitialisedRead : Error {
  using Error::Error;
};
struct CapacityError : Error {
  using Error::Error;
};
struct Deadlock : Error {
  using Error::Error;
};

}  // namespace neuron
