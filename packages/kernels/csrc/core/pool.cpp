#include "pool.h"

#include <algorithm>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define DRIVETRAIN_HAS_FORK 1
#endif

namespace drivetrain {
namespace {

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
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
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
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        grow(helpers);
        work_ = &work;
        pieces_ = pieces;
        next_.store(0, std::memory_order_relaxed);
        wanted_ = std::min(helpers, workers_.size());
        ++generation_;
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // a worker that has not woken by now has nothing left to do: on a busy machine, don't wait for it
    finished_.wait(lock, [this] { return active_ == 0; });
    work_ = nullptr;
}

void Pool::drain() {
    for (;;) {
        const std::size_t piece = next_.fetch_add(1, std::memory_order_relaxed);
        if (piece >= pieces_) return;
        (*work_)(piece);
    }
}

void Pool::serve(std::size_t worker) {
    std::size_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || (generation_ != seen && worker < wanted_); });
        if (stop_) return;
        seen = generation_;
        ++active_;
        lock.unlock();
        drain();
        lock.lock();
        if (--active_ == 0) finished_.notify_one();
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
