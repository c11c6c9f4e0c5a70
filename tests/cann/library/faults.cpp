// Faults that a test asks for: each happens once, to the next thing of its kind, but a broken link stays.
#include "device.h"

#include <atomic>

namespace {

std::atomic<int> operator_code{0}, collective_code{0}, call_code{0};
std::atomic<bool> collective_hangs{false}, link_up_fails{false}, link_broken{false};

}  // namespace

namespace fake {

aclError next_fault() { return operator_code.exchange(0); }
aclError next_collective_fault() {
  int code = collective_code.exchange(0);
  return code == 0 && link_broken ? ACL_ERROR_RT_COMM_OP_RETRY_FAIL : code;
}
void mend_link() { link_broken = false; }
int next_call_fault() { return call_code.exchange(0); }
bool next_collective_hangs() { return collective_hangs.exchange(false); }
bool next_link_up_fails() { return link_up_fails.exchange(false); }

}  // namespace fake

extern "C" {

// The next operator fails on the device with this code of CANN.
void fake_cann_fail_operator(int code) { operator_code = code; }
// The next collective fails on the device with this code of CANN.
void fake_cann_fail_collective(int code) { collective_code = code; }
// The next call of an operator or a collective returns this code, before anything is queued.
void fake_cann_fail_call(int code) { call_code = code; }
// The next collective never ends by itself.
void fake_cann_hang_collective() { collective_hangs = true; }
// Each collective fails as one whose retries have failed, until a communicator is destroyed, to be built again.
void fake_cann_break_link() { link_broken = true; }
// The next communicator does not come up.
void fake_cann_fail_link_up() { link_up_fails = true; }

}  // extern "C"
