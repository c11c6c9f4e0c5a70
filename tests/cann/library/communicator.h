// A communicator of HCCL.
#pragma once

#include "links.h"

#include <atomic>
#include <memory>
#include <string>

namespace fake {

struct Communicator {
  Communicator(uint32_t size, uint32_t rank) : size(size), rank(rank), links(size) {}
  ~Communicator();

  const uint32_t size, rank;
  Links links;
  std::string name;
  uint64_t bytes = 0;                 // of the device, for its buffers
  std::atomic<uint64_t> aborts{0};    // of the device, when it was made or resumed last
};

using Shared = std::shared_ptr<Communicator>;

Shared communicator_of(void *handle);

}  // namespace fake
