// Copies into memory that a rank on another core reads. No torch here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace neuron::collectives {

// The lines of a window lie in the caches of the rank that has read them. Where the two cores share a cache, an
// ordinary copy is best, because the reader finds the data in it. Where they do not, taking the lines back one by one
// is ten times slower than writing past the caches. The machine does not tell, and a virtual one changes: the writer
// tries both from time to time.
class Writer {
 public:
  void write(std::byte* to, const std::byte* from, size_t n);

 private:
  static constexpr size_t kTries = 16;
  using Paces = std::array<double, kTries>;  // nanoseconds per byte
  Paces plain_{}, streamed_{};
  size_t copies_ = 0;  // since the tries began
  bool streams_ = false;
};

}  // namespace neuron::collectives
