// Streams and events. Each stream runs its work in order, in a thread that the first work starts.
#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct Stream {
  std::deque<std::pair<uint64_t, fake::Work>> queue;
  bool running = false;
  bool started = false;
  bool closed = false;
};

struct Event {
  uint64_t asked = 0, done = 0;  // how often it was recorded, and how often the stream has come there
  uint64_t aborts = 0;           // when it was recorded last
  uint64_t time_us = 0;
};

uint64_t aborts = 0;
int aborting = 0;
aclError failed = ACL_SUCCESS;  // why the device takes no more work until it is aborted
std::vector<std::shared_ptr<Stream>> streams;
std::vector<std::function<void()>> abort_calls;

uint64_t now_us() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

void serve(std::shared_ptr<Stream> stream) {
  pthread_setname_np(pthread_self(), "cann_stream");
  std::unique_lock<std::mutex> held(fake::lock());
  while (true) {
    fake::changed().wait(held, [&] { return stream->closed || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    auto [queued, work] = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (failed == ACL_SUCCESS && queued == aborts) {
      stream->running = true;
      held.unlock();
      aclError code = work(queued);
      work = nullptr;
      held.lock();
      stream->running = false;
      if (code != ACL_SUCCESS && queued == aborts && failed == ACL_SUCCESS) {
        failed = code;
        fake::log("the device has failed with %d", code);
      }
    }
    fake::changed().notify_all();
  }
}

// The stream behind a handle; the default stream for none. With the lock held.
std::shared_ptr<Stream> find(aclrtStream handle) {
  static auto standard = [] {
    streams.push_back(std::make_shared<Stream>());
    return streams.back();
  }();
  if (handle == nullptr) return standard;
  for (auto &stream : streams)
    if (stream.get() == handle) return stream;
  return nullptr;
}

// Wait until `over`, the device has failed or is aborted, or the time has passed. With the lock held.
template <class Over>
aclError await(std::unique_lock<std::mutex> &held, Over over, int32_t timeout_ms) {
  uint64_t before = aborts;
  auto done = [&] { return aborts != before || failed != ACL_SUCCESS || over(); };
  if (timeout_ms > 0) {
    if (!fake::changed().wait_for(held, std::chrono::milliseconds(timeout_ms), done)) {
      return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
    }
  } else {
    fake::changed().wait(held, done);
  }
  if (aborts != before) return fake::fail(ACL_ERROR_RT_DEVICE_TASK_ABORT);
  return failed == ACL_SUCCESS ? ACL_SUCCESS : fake::fail(failed);
}

bool idle(const Stream &stream) { return stream.queue.empty() && !stream.running; }
bool all_idle() {
  return std::all_of(streams.begin(), streams.end(), [](auto &stream) { return idle(*stream); });
}
bool over(const Event &event) { return event.done >= event.asked || event.aborts != aborts; }

// Whether a stream has come to where an event was recorded last when this was made: later records are none of its business.
class Record {
 public:
  explicit Record(std::shared_ptr<Event> event) : event_(std::move(event)), number_(event_->asked), aborts_(event_->aborts) {}
  bool over() const { return event_->done >= number_ || aborts_ != aborts; }

 private:
  std::shared_ptr<Event> event_;
  uint64_t number_, aborts_;
};

Record last_record(aclrtEvent handle) {
  std::lock_guard<std::mutex> held(fake::lock());
  return Record(*static_cast<std::shared_ptr<Event> *>(handle));
}

}  // namespace

namespace fake {

// Never destroyed: threads of streams outlive main.
std::mutex &lock() {
  static auto *made = new std::mutex;
  return *made;
}
std::condition_variable &changed() {
  static auto *made = new std::condition_variable;
  return *made;
}

aclError enqueue(aclrtStream handle, Work work) {
  static const auto depth = static_cast<size_t>(setting("FAKE_CANN_STREAM_DEPTH", 0));
  std::unique_lock<std::mutex> held(lock());
  if (aborting) return fail(ACL_ERROR_RT_DEVICE_TASK_ABORT);
  if (failed != ACL_SUCCESS) return fail(failed);
  auto stream = find(handle);
  if (!stream) return ACL_ERROR_RT_STREAM_CONTEXT;
  if (depth > 0) {  // as a device's: who queues more waits
    uint64_t before = aborts;
    changed().wait(held, [&] { return stream->queue.size() < depth || aborts != before || failed != ACL_SUCCESS; });
    if (aborts != before) return fail(ACL_ERROR_RT_DEVICE_TASK_ABORT);
    if (failed != ACL_SUCCESS) return fail(failed);
  }
  if (!stream->started) {
    stream->started = true;
    std::thread(serve, stream).detach();
  }
  stream->queue.emplace_back(aborts, std::move(work));
  changed().notify_all();
  return ACL_SUCCESS;
}

bool interrupted(uint64_t before) {
  std::lock_guard<std::mutex> held(lock());
  return aborts != before;
}

uint64_t abort_count() {
  std::lock_guard<std::mutex> held(lock());
  return aborts;
}

void on_abort(std::function<void()> call) { abort_calls.push_back(std::move(call)); }

bool device_lost() {
  std::lock_guard<std::mutex> held(lock());
  return failed == ACL_ERROR_RT_LOST_HEARTBEAT;
}

void abort_streams() {
  std::unique_lock<std::mutex> held(lock());
  aborting++;
  aborts++;
  failed = ACL_SUCCESS;
  for (auto &stream : streams) stream->queue.clear();
  changed().notify_all();
  held.unlock();
  for (auto &call : abort_calls) call();
  held.lock();
  changed().wait(held, [] { return all_idle(); });
  aborting--;
  changed().notify_all();
}

}  // namespace fake

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t, uint32_t) {
  std::lock_guard<std::mutex> held(fake::lock());
  find(nullptr);
  streams.push_back(std::make_shared<Stream>());
  *handle = streams.back().get();
  return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }

aclError aclrtDestroyStreamForce(aclrtStream handle) {
  std::lock_guard<std::mutex> held(fake::lock());
  auto stream = find(handle);
  if (!stream) return ACL_ERROR_RT_STREAM_CONTEXT;
  stream->closed = true;
  stream->queue.clear();
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  fake::changed().notify_all();
  return ACL_SUCCESS;
}

aclError aclrtDestroyStream(aclrtStream handle) { return aclrtDestroyStreamForce(handle); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  std::unique_lock<std::mutex> held(fake::lock());
  auto stream = find(handle);
  if (!stream) return ACL_ERROR_RT_STREAM_CONTEXT;
  return await(held, [&] { return idle(*stream); }, timeout_ms);
}

aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  std::unique_lock<std::mutex> held(fake::lock());
  return await(held, all_idle, timeout_ms);
}

aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  std::lock_guard<std::mutex> held(fake::lock());
  auto stream = find(handle);
  if (!stream) return ACL_ERROR_RT_STREAM_CONTEXT;
  *status = idle(*stream) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) {
  *event = new std::shared_ptr<Event>(std::make_shared<Event>());
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<std::shared_ptr<Event> *>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  auto event = *static_cast<std::shared_ptr<Event> *>(handle);
  uint64_t number;
  {
    std::lock_guard<std::mutex> held(fake::lock());
    number = ++event->asked;
    event->aborts = aborts;
  }
  return fake::enqueue(stream, [event, number](uint64_t) {
    std::lock_guard<std::mutex> held(fake::lock());
    event->done = std::max(event->done, number);
    event->time_us = now_us();
    return ACL_SUCCESS;
  });
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  Record record = last_record(handle);
  return fake::enqueue(stream, [record](uint64_t before) {
    std::unique_lock<std::mutex> held(fake::lock());
    fake::changed().wait(held, [&] { return aborts != before || failed != ACL_SUCCESS || record.over(); });
    return ACL_SUCCESS;
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  Record record = last_record(handle);
  std::unique_lock<std::mutex> held(fake::lock());
  return await(held, [&] { return record.over(); }, -1);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  auto event = *static_cast<std::shared_ptr<Event> *>(handle);
  std::lock_guard<std::mutex> held(fake::lock());
  *status = over(*event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
  auto event = *static_cast<std::shared_ptr<Event> *>(handle);
  std::lock_guard<std::mutex> held(fake::lock());
  *status = over(*event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent from, aclrtEvent to) {
  auto first = *static_cast<std::shared_ptr<Event> *>(from), second = *static_cast<std::shared_ptr<Event> *>(to);
  *ms = static_cast<float>(second->time_us - first->time_us) / 1000.0f;
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t *time_us) {
  *time_us = (*static_cast<std::shared_ptr<Event> *>(handle))->time_us;
  return ACL_SUCCESS;
}

}  // extern "C"
