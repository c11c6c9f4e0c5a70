// The one device of a process: what the files of the fake CANN share.
//
// Device memory is host memory. Each stream has a thread of its own; what is queued on it fails later than it was called.
// One lock guards everything but the work itself, which runs without it.
#pragma once

#include <acl/acl.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>

namespace fake {

// A piece of work on a stream. It is given the number of aborts there had been when it was queued (see `interrupted`).
using Work = std::function<aclError(uint64_t aborts)>;

std::mutex &lock();
std::condition_variable &changed();  // with `lock`: a stream went idle, an event was recorded, the device was aborted

// Queue work on a stream. Returns at once: an error if the device is being aborted or has failed.
aclError enqueue(aclrtStream stream, Work work);

// Whether the device was aborted since work was queued: it has to end then. Long work asks every few milliseconds.
bool interrupted(uint64_t aborts);
uint64_t abort_count();

// Whether the driver hears nothing of the device any more: nothing that is done in this process changes that.
bool device_lost();

// Abort what is queued and what runs, on all streams, and wait until nothing runs any more.
void abort_streams();
// What an abort ends, too, while the streams are being aborted.
void on_abort(std::function<void()> call);

// Count device memory as used or free. `take` returns whether there is enough.
bool take_bytes(size_t bytes);
void give_bytes(size_t bytes);

// Have the calling thread find this text in aclGetRecentErrMsg, and return the code.
aclError fail(aclError code, const std::string &text);
// The same with the text that CANN has for a code.
aclError fail(aclError code);

// Device faults that tests ask for (faults.cpp).
aclError next_fault();               // of the next work of an operator; ACL_SUCCESS: none
aclError next_collective_fault();    // of the next collective on the device
int next_call_fault();               // what the next call returns at once
bool next_collective_hangs();
bool next_link_up_fails();
void mend_link();  // a communicator is destroyed, to be built again

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double setting(const char *name, double otherwise) {
  const char *value = std::getenv(name);
  return value && *value ? std::atof(value) : otherwise;
}

void log(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace fake
