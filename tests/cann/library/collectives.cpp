// The collectives: each is queued on its stream and returns. A rank that is gone is waited for until the device is aborted,
// or HCCL_EXEC_TIMEOUT is over: on a device nothing tells that it is gone.
#include "communicator.h"
#include "device.h"
#include "reduction.h"

#include <hccl/hccl.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <vector>

namespace {

using fake::Communicator;
using fake::Ended;
using fake::Message;
using fake::Shared;

// What a collective has at hand while it runs.
struct Round {
  Communicator &comm;
  uint64_t aborts;
  double limit_s;

  aclError exchange(std::vector<Message> messages) {
    switch (comm.links.exchange(std::move(messages), aborts, limit_s)) {
      case Ended::DONE: return ACL_SUCCESS;
      case Ended::INTERRUPTED: return ACL_ERROR_RT_DEVICE_TASK_ABORT;
      default: return ACL_ERROR_RT_AICORE_TIMEOUT;
    }
  }
};

using Run = std::function<aclError(Round &)>;

// Queue a collective. What the host notices is returned at once, and ends torch-npu's queue.
HcclResult queue(HcclComm handle, aclrtStream stream, Run run) {
  auto comm = fake::communicator_of(handle);
  if (!comm) return HCCL_E_PARA;
  if (int code = fake::next_call_fault()) {
    fake::fail(code, "EI9999: a collective was refused.");
    return static_cast<HcclResult>(code);
  }
  if (comm->aborts != fake::abort_count()) {
    fake::fail(0, "reason=[device task abort]");
    return HCCL_E_SUSPENDING;
  }
  aclError code = fake::enqueue(stream, [comm, run](uint64_t aborts) -> aclError {
    if (aclError fault = fake::next_collective_fault()) return fault;
    if (comm->aborts != aborts) return ACL_ERROR_RT_DEVICE_TASK_ABORT;
    bool hangs = fake::next_collective_hangs();
    while (hangs && !fake::interrupted(aborts)) usleep(5000);
    if (hangs) return ACL_ERROR_RT_DEVICE_TASK_ABORT;
    Round round{*comm, aborts, fake::now_s() + fake::setting("HCCL_EXEC_TIMEOUT", 1836)};
    return run(round);
  });
  return code == ACL_SUCCESS ? HCCL_SUCCESS : code == ACL_ERROR_RT_DEVICE_TASK_ABORT ? HCCL_E_SUSPENDING : HCCL_E_RUNTIME;
}

struct Part {
  uint64_t first, count;
};

// The part of `count` numbers that a rank adds up.
Part part_of(uint64_t count, uint32_t size, uint32_t rank) {
  uint64_t first = count * rank / size;
  return {first, count * (rank + 1) / size - first};
}

// Each rank sends a part to each; add up the own one, in the order of the ranks.
aclError reduce_parts(Round &round, char *from, char *into, const std::vector<Part> &parts, HcclDataType type,
                      HcclReduceOp op) {
  uint64_t width = fake::size_of(type);
  uint32_t own = round.comm.rank, size = round.comm.size;
  uint64_t bytes = parts[own].count * width;
  std::vector<std::vector<char>> given(size, std::vector<char>(bytes));
  std::vector<Message> messages;
  for (uint32_t peer = 0; peer < size; peer++) {
    char *at = from + parts[peer].first * width;
    if (peer == own) {
      std::memcpy(given[own].data(), at, bytes);
    } else {
      messages.push_back({peer, true, at, parts[peer].count * width});
      messages.push_back({peer, false, given[peer].data(), bytes});
    }
  }
  if (aclError code = round.exchange(std::move(messages))) return code;
  std::memcpy(into, given[0].data(), bytes);
  for (uint32_t peer = 1; peer < size; peer++) {
    if (!fake::reduce(into, given[peer].data(), parts[own].count, type, op)) return ACL_ERROR_RT_PARAM_INVALID;
  }
  return ACL_SUCCESS;
}

// Each rank has its part in its place; all get all of them.
aclError gather_parts(Round &round, char *into, const std::vector<Part> &parts, uint64_t width) {
  std::vector<Message> messages;
  uint32_t own = round.comm.rank;
  for (uint32_t peer = 0; peer < round.comm.size; peer++) {
    if (peer == own) continue;
    messages.push_back({peer, true, into + parts[own].first * width, parts[own].count * width});
    messages.push_back({peer, false, into + parts[peer].first * width, parts[peer].count * width});
  }
  return round.exchange(std::move(messages));
}

std::vector<Part> equal_parts(uint64_t count, uint32_t size) {
  std::vector<Part> parts;
  for (uint32_t rank = 0; rank < size; rank++) parts.push_back({count * rank, count});
  return parts;
}

std::vector<Part> given_parts(const void *counts, const void *firsts, uint32_t size) {
  std::vector<Part> parts;
  for (uint32_t rank = 0; rank < size; rank++) {
    parts.push_back({static_cast<const uint64_t *>(firsts)[rank], static_cast<const uint64_t *>(counts)[rank]});
  }
  return parts;
}

aclError all_to_all(Round &round, char *from, const std::vector<Part> &given, char *into, const std::vector<Part> &taken,
                    uint64_t width) {
  std::vector<Message> messages;
  uint32_t own = round.comm.rank;
  for (uint32_t peer = 0; peer < round.comm.size; peer++) {
    char *out = from + given[peer].first * width, *in = into + taken[peer].first * width;
    if (peer == own) {
      std::memmove(in, out, given[own].count * width);
    } else {
      messages.push_back({peer, true, out, given[peer].count * width});
      messages.push_back({peer, false, in, taken[peer].count * width});
    }
  }
  return round.exchange(std::move(messages));
}

char *bytes_of(const void *data) { return static_cast<char *>(const_cast<void *>(data)); }

uint32_t size_in(HcclComm handle) {
  auto comm = fake::communicator_of(handle);
  return comm ? comm->size : 0;
}

}  // namespace

extern "C" {

HcclResult HcclAllReduce(void *from, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) -> aclError {
    std::vector<Part> parts;
    for (uint32_t rank = 0; rank < round.comm.size; rank++) parts.push_back(part_of(count, round.comm.size, rank));
    uint64_t width = fake::size_of(type);
    char *own = bytes_of(into) + parts[round.comm.rank].first * width;
    if (aclError code = reduce_parts(round, bytes_of(from), own, parts, type, op)) return code;
    return gather_parts(round, bytes_of(into), parts, width);
  });
}

HcclResult HcclReduceScatter(void *from, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    return reduce_parts(round, bytes_of(from), bytes_of(into), equal_parts(count, round.comm.size), type, op);
  });
}

HcclResult HcclReduce(void *from, void *into, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    std::vector<Part> parts(round.comm.size);
    parts[root] = {0, count};
    std::vector<char> unused(1);
    char *target = round.comm.rank == root ? bytes_of(into) : unused.data();
    return reduce_parts(round, bytes_of(from), target, parts, type, op);
  });
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    std::vector<Message> messages;
    uint64_t bytes = count * fake::size_of(type);
    for (uint32_t peer = 0; peer < round.comm.size; peer++) {
      if (peer != round.comm.rank && (peer == root || round.comm.rank == root)) {
        messages.push_back({peer, round.comm.rank == root, bytes_of(data), bytes});
      }
    }
    return round.exchange(std::move(messages));
  });
}

HcclResult HcclAllGather(void *from, void *into, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    uint64_t width = fake::size_of(type);
    std::memmove(bytes_of(into) + round.comm.rank * count * width, from, count * width);
    return gather_parts(round, bytes_of(into), equal_parts(count, round.comm.size), width);
  });
}

HcclResult HcclAllGatherV(void *from, uint64_t count, void *into, const void *counts, const void *firsts, HcclDataType type,
                          HcclComm comm, aclrtStream stream) {
  auto parts = given_parts(counts, firsts, size_in(comm));
  return queue(comm, stream, [=](Round &round) {
    uint64_t width = fake::size_of(type);
    std::memmove(bytes_of(into) + parts[round.comm.rank].first * width, from, count * width);
    return gather_parts(round, bytes_of(into), parts, width);
  });
}

HcclResult HcclReduceScatterV(void *from, const void *counts, const void *firsts, void *into, uint64_t, HcclDataType type,
                              HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto parts = given_parts(counts, firsts, size_in(comm));
  return queue(comm, stream,
               [=](Round &round) { return reduce_parts(round, bytes_of(from), bytes_of(into), parts, type, op); });
}

HcclResult HcclScatter(void *from, void *into, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    std::vector<Message> messages;
    uint64_t bytes = count * fake::size_of(type);
    if (round.comm.rank != root) messages.push_back({root, false, bytes_of(into), bytes});
    for (uint32_t peer = 0; round.comm.rank == root && peer < round.comm.size; peer++) {
      char *at = bytes_of(from) + peer * bytes;
      peer == root ? (void)std::memmove(into, at, bytes) : messages.push_back({peer, true, at, bytes});
    }
    return round.exchange(std::move(messages));
  });
}

HcclResult HcclAlltoAll(const void *from, uint64_t given, HcclDataType type, const void *into, uint64_t taken, HcclDataType,
                        HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    return all_to_all(round, bytes_of(from), equal_parts(given, round.comm.size), bytes_of(into),
                      equal_parts(taken, round.comm.size), fake::size_of(type));
  });
}

HcclResult HcclAlltoAllV(const void *from, const void *counts, const void *firsts, HcclDataType type, const void *into,
                         const void *taken_counts, const void *taken_firsts, HcclDataType, HcclComm comm,
                         aclrtStream stream) {
  auto given = given_parts(counts, firsts, size_in(comm)), taken = given_parts(taken_counts, taken_firsts, size_in(comm));
  return queue(comm, stream, [=](Round &round) {
    return all_to_all(round, bytes_of(from), given, bytes_of(into), taken, fake::size_of(type));
  });
}

HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    return round.exchange({{peer, true, bytes_of(data), count * fake::size_of(type)}});
  });
}

HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    return round.exchange({{peer, false, bytes_of(data), count * fake::size_of(type)}});
  });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<Message> messages;
  for (uint32_t index = 0; index < count; index++) {
    const auto &item = items[index];
    uint64_t bytes = item.count * fake::size_of(item.dataType);
    messages.push_back({item.remoteRank, item.sendRecvType == HCCL_SEND, bytes_of(item.buf), bytes});
  }
  return queue(comm, stream, [=](Round &round) -> aclError {
    std::vector<Message> others;
    std::vector<Message> own[2];  // what a rank receives from itself, and sends to itself
    for (const auto &each : messages) (each.peer == round.comm.rank ? own[each.sending] : others).push_back(each);
    for (size_t index = 0; index < own[0].size() && index < own[1].size(); index++) {
      std::memmove(own[0][index].data, own[1][index].data, own[0][index].bytes);
    }
    return round.exchange(std::move(others));
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return queue(comm, stream, [=](Round &round) {
    std::vector<char> bytes(2 * round.comm.size);
    std::vector<Message> messages;
    for (uint32_t peer = 0; peer < round.comm.size; peer++) {
      if (peer == round.comm.rank) continue;
      messages.push_back({peer, true, &bytes[2 * peer], 1});
      messages.push_back({peer, false, &bytes[2 * peer + 1], 1});
    }
    return round.exchange(std::move(messages));
  });
}

}  // extern "C"
