// Shared memory of a process that its peers on the host can read. No torch here.
//
// The memory has no name in any file system: it is an anonymous memory file that peers open through the owner's
// /proc entry, which the kernel allows to the same user only. Whatever dies, nothing is left behind. The file is sealed
// against shrinking, so a peer can never take mapped pages away. The owner holds a record lock on it for life: the
// kernel tells every peer when the owner is gone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "doorbell.h"

namespace neuron::collectives {

// Where a peer finds a segment; travels through the job's store.
struct SegmentAddress {
  int32_t pid = 0, fd = -1;
  uint64_t bytes = 0;
  std::array<uint8_t, 16> token{};  // random: proves that the memory is the one meant
};

struct SegmentHeader {
  std::array<uint8_t, 16> token;
  Doorbell doorbell;
};

class Segment {
 public:
  // Creates this process's memory.
  explicit Segment(size_t bytes);
  // Maps a peer's. Throws if it is not what the address says.
  explicit Segment(const SegmentAddress& address);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentAddress& address() const { return address_; }
  Doorbell& doorbell() { return header()->doorbell; }
  // False once the owner's process is gone.
  bool alive() const;
  // The object at an offset that a peer told: checked to lie inside.
  template <class T>
  T* at(uint64_t offset, size_t count = 1) {
    return static_cast<T*>(checked(offset, sizeof(T) * count));
  }

  // Owner only: space in the segment, 64-byte aligned; nothing if it is used up.
  std::optional<uint64_t> allocate(size_t bytes);
  void release(uint64_t offset);
  size_t in_use() const;

 private:
  SegmentHeader* header() { return static_cast<SegmentHeader*>(base_); }
  void* checked(uint64_t offset, size_t bytes);
  void map();

  SegmentAddress address_;
  int fd_ = -1;
  void* base_ = nullptr;
  bool owner_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_, used_;  // offset -> bytes
};

// Random bytes from the kernel.
void random_bytes(void* out, size_t n);

}  // namespace neuron::collectives
