#include "pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define DRIVETRAIN_HAS_FORK 1
#endif

namespace drivetrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kOpen = 1u << 31, kWorkers = kOpen - 1;  // of the gate: whether it is open, and who is in; above them the number of the loop
constexpr std::chrono::microseconds kPatience{50};

void rest_a_little() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Whether `done` becomes true within kPatience. Gives way to other threads that want this core.
template <typename Done>
bool look_out(const Done& done) {
    constexpr int kLooks = 32;  // between two times of giving way
    const Clock::time_point end = Clock::now() + kPatience;
    do {
        for (int look = 0; look < kLooks; ++look) {
            if (done()) return true;
            rest_a_little();
        }
        std::this_thread::yield();
    } while (Clock::now() < end);
    return done();
}

std::atomic<Pool*> process_pool{nullptr};
std::atomic<int> thread_setting{0};

#ifdef DRIVETRAIN_HAS_FORK
// In the child only the forking thread exists: the parent's pool, whose locks may be held by threads that are gone, is left alone
// for good and the next use makes another.
void forget_pool() { process_pool.store(nullptr, std::memory_order_release); }
#endif

}  // namespace

Pool& Pool::shared() {
    Pool* pool = process_pool.load(std::memory_order_acquire);
    if (pool != nullptr) return *pool;
#ifdef DRIVETRAIN_HAS_FORK
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
#endif
    Pool* fresh = new Pool;
    if (process_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
    return *pool;
}

int Pool::setting() { return thread_setting.load(std::memory_order_relaxed); }

void Pool::set(int threads) { thread_setting.store(std::max(threads, 0), std::memory_order_relaxed); }

Pool::~Pool() {
    stop_ = true;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(std::size_t pieces, int threads, const std::function<void(std::size_t)>& work) {
    const std::size_t helpers = std::min(pieces, static_cast<std::size_t>(std::max(threads, 1))) - (pieces == 0 ? 0 : 1);
    if (helpers == 0) {
        for (std::size_t piece = 0; piece < pieces; ++piece) work(piece);
        return;
    }
    const std::lock_guard<std::mutex> turn(turn_);
    grow(helpers);
    work_ = &work;
    pieces_ = pieces;
    next_.store(0, std::memory_order_relaxed);
    wanted_.store(std::min(helpers, workers_.size()), std::memory_order_relaxed);
    gate_ = (gate_.load(std::memory_order_relaxed) + 2 * kOpen) | kOpen;  // of the next loop; no worker is in
    if (sleepers_ != 0) {
        {  // who has counted itself and not seen the gate open holds this until it sleeps
            const std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
    drain();
    // A worker that has not joined by now has nothing left to do: on a busy machine, don't wait for it.
    if ((gate_.fetch_and(~kOpen) & kWorkers) == 0) return;
    if (look_out([this] { return (gate_ & kWorkers) == 0; })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_ = true;
    finished_.wait(lock, [this] { return (gate_ & kWorkers) == 0; });
    caller_sleeps_ = false;
}

void Pool::drain() {
    for (;;) {
        const std::size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
        if (piece >= pieces_) return;
        (*work_)(piece);
    }
}

bool Pool::may_join(std::size_t worker, std::uint64_t seen) const {
    const std::uint64_t gate = gate_;
    return stop_ || ((gate & kOpen) != 0 && gate / (2 * kOpen) != seen && worker < wanted_.load(std::memory_order_relaxed));
}

// False where the loop closed in the meantime. That the exchange succeeds says that all this is of one loop.
bool Pool::join(std::size_t worker, std::uint64_t* seen) {
    std::uint64_t gate = gate_;
    while ((gate & kOpen) != 0 && gate / (2 * kOpen) != *seen && worker < wanted_.load(std::memory_order_relaxed)) {
        if (gate_.compare_exchange_weak(gate, gate + 1)) {
            *seen = gate / (2 * kOpen);
            return true;
        }
    }
    return false;
}

void Pool::leave() {
    if ((gate_.fetch_sub(1) & (kOpen | kWorkers)) != 1 || !caller_sleeps_) return;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
    }
    finished_.notify_one();
}

void Pool::serve(std::size_t worker) {
    std::uint64_t seen = 0;
    bool patient = false;
    const auto ready = [&] { return may_join(worker, seen); };
    while (!stop_) {
        const Clock::time_point idle = Clock::now();
        if (!(patient && look_out(ready))) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleepers_;
            wake_.wait(lock, ready);
            --sleepers_;
        }
        patient = Clock::now() - idle < 2 * kPatience;
        if (!join(worker, &seen)) continue;
        drain();
        leave();
    }
}

void Pool::grow(std::size_t workers) {
    while (workers_.size() < workers) {
        const std::size_t index = workers_.size();
        try {
            workers_.emplace_back([this, index] { serve(index); });
        } catch (const std::system_error&) {
            return;  // no more threads to be had: the caller does the work with those that are there
        }
    }
}

}  // namespace drivetrain
