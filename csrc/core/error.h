// Errors of kernels: which instruction and operand, what is wrong, and the kernel's line where the thrower knows it.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace neuron {

struct Error : std::runtime_error {
  explicit Error(std::string_view limit_) : Error("", "", limit_) {}
  // source 0: the line is added by whoever catches it
  Error(std::string_view instruction_, std::string_view operand_, std::string_view limit_, uint32_t source_ = 0)
      : std::runtime_error(text(instruction_, operand_, limit_, source_)),
        instruction(instruction_),
        operand(operand_),
        limit(limit_),
        source(source_) {}
  std::string instruction, operand, limit;
  uint32_t source;

 private:
  static std::string text(std::string_view instruction, std::string_view operand, std::string_view limit,
                          uint32_t source) {
    std::string out;
    for (const std::string_view part : {instruction, operand, limit})
      if (!part.empty()) out.append(out.empty() ? "" : " ").append(part);
    return source ? out + " (@" + std::to_string(source) + ")" : out;
  }
};

// A limit of the hardware is violated.
struct ValidationError : Error {
  using Error::Error;
};
struct OutOfBounds : Error {
  using Error::Error;
};
struct UninitialisedRead : Error {
  using Error::Error;
  UninitialisedRead also(const std::string& more) const { return {instruction, operand, limit + more, source}; }
};
struct CapacityError : Error {
  using Error::Error;
};
struct Deadlock : Error {
  using Error::Error;
};

}  // namespace neuron
