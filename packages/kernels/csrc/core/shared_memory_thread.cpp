#include "shared_memory_thread.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <pthread.h>
#include <signal.h>

namespace drivetrain {
namespace {

constexpr int kLookMilliseconds = 50;  // how often a thread that waits for others looks whether they live
constexpr int kIdleMilliseconds = 1 << 30;

std::atomic<SharedMemoryThread*> process_thread{nullptr};

void forget_thread() { process_thread.store(nullptr, std::memory_order_release); }

// Signals are for the threads of the program: their handlers must not run on one started in this scope.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

}  // namespace

SharedMemoryThread::SharedMemoryThread() : bell_segment_(Segment::create(kBellBytes)) {}

SharedMemoryThread::~SharedMemoryThread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    bell().ring();
    if (thread_.joinable()) thread_.join();
}

SharedMemoryThread& SharedMemoryThread::shared() {
    SharedMemoryThread* thread = process_thread.load(std::memory_order_acquire);
    if (thread != nullptr) return *thread;
    static const int registered = pthread_atfork(nullptr, nullptr, forget_thread);
    (void)registered;
    auto fresh = std::make_unique<SharedMemoryThread>();
    if (process_thread.compare_exchange_strong(thread, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
    return *thread;
}

void SharedMemoryThread::add(std::shared_ptr<SharedMemoryGroup> group) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!thread_.joinable()) {
            const SignalsBlocked blocked;
            thread_ = std::thread([this] { serve(); });
        }
        added_.push_back(std::move(group));
    }
    bell().ring();
}

void SharedMemoryThread::remove(const std::shared_ptr<SharedMemoryGroup>& group) {
    std::unique_lock<std::mutex> lock(mutex_);
    leaving_.push_back(group);
    bell().ring();
    removed_.wait(lock, [&] { return std::find(leaving_.begin(), leaving_.end(), group) == leaving_.end(); });
}

// Returns whether the thread shall end.
bool SharedMemoryThread::take_changes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.insert(groups_.end(), added_.begin(), added_.end());
    added_.clear();
    for (const std::shared_ptr<SharedMemoryGroup>& group : leaving_) {
        group->close();
        groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
    }
    if (!leaving_.empty()) {
        leaving_.clear();
        removed_.notify_all();
    }
    return stop_;
}

void SharedMemoryThread::serve() {
    bool ask_processes = false;
    for (;;) {
        const std::uint32_t seen = bell().rings.load();
        if (take_changes()) return;
        bool moved = false, busy = false;
        for (const std::shared_ptr<SharedMemoryGroup>& group : groups_) {
            moved |= group->step();
            busy |= group->busy();
        }
        if (moved) continue;
        for (const std::shared_ptr<SharedMemoryGroup>& group : groups_) {
            if (group->busy()) group->check_peers(ask_processes);
        }
        ask_processes = !bell().sleep(seen, busy ? kLookMilliseconds : kIdleMilliseconds);
    }
}

}  // namespace drivetrain
