// Memory that holds machine code: written once, then executable and no longer writable.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace neuron {

class Code {
 public:
  Code() = default;
  explicit Code(std::span<const uint8_t> bytes);  // empty where the system refuses such memory
  Code(Code&& other) noexcept : p_(other.p_), size_(other.size_) { other.p_ = nullptr; }
  Code& operator=(Code&&) = delete;
  ~Code();
  const uint8_t* data() const { return p_; }
  explicit operator bool() const { return p_; }

 private:
  uint8_t* p_ = nullptr;
  size_t size_ = 0;
};

}  // namespace neuron
