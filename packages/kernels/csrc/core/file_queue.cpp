#include "file_queue.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ring.h"

namespace drivetrain {

struct FileQueue::Block {
    std::shared_ptr<FileRequest> request;
    bool writes = false, direct = false;
    char* data = nullptr;
    std::size_t bytes = 0;
    std::int64_t offset = 0;
};

// What is left to take of a request.
struct FileQueue::Transfer {
    std::shared_ptr<FileRequest> request;
    bool writes;
    char* data;                             // of the byte at `begin`
    std::size_t begin, first, last, end, at;  // offsets in the file: what may go directly lies from `first` to `last`; the next block
};

namespace {

constexpr std::size_t kPage = 4096;

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<char, Free>;

// How the file system asks that the memory of direct requests be aligned (Linux 6.1 tells); a page where nothing is known.
std::size_t memory_alignment(int fd) {
#if defined(__linux__) && defined(SYS_statx)
    constexpr unsigned kAlignment = 0x2000;
    constexpr int kEmptyPath = 0x1000;
    alignas(8) char found[256] = {};
    if (syscall(SYS_statx, fd, "", kEmptyPath, kAlignment, found) != 0) return kPage;
    std::uint32_t mask, alignment;
    std::memcpy(&mask, found, sizeof mask);
    std::memcpy(&alignment, found + 0x98, sizeof alignment);  // stx_dio_mem_align
    return (mask & kAlignment) != 0 && alignment != 0 ? alignment : kPage;
#else
    return static_cast<void>(fd), kPage;
#endif
}

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

std::size_t pieces(std::size_t bytes, std::size_t piece) { return (bytes + piece - 1) / piece; }

}  // namespace

int FileRequest::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return blocks_ == 0; });
    return error_;
}

bool FileRequest::done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_ == 0;
}

std::int64_t FileRequest::failed_at() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failed_at_;
}

bool FileRequest::failed_before(std::int64_t offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_ != 0 && failed_at_ < offset;
}

void FileRequest::finish_block(int error, std::int64_t offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error != 0 && (error_ == 0 || offset < failed_at_)) {
        error_ = error;
        failed_at_ = offset;
    }
    if (--blocks_ == 0) finished_.notify_all();
}

// A block under way and how far it has come.
struct FileQueue::Slot {
    Block block;
    std::size_t done = 0;
    bool bounced = false;
    Buffer buffer;

    char* here() { return (bounced ? buffer.get() : block.data) + done; }
    std::size_t left() const { return block.bytes - done; }
    std::int64_t offset() const { return block.offset + static_cast<std::int64_t>(done); }
};

// Serves the queue from one thread.
class FileQueue::Worker {
public:
    Worker(FileQueue& queue, unsigned depth) : queue_(queue), slots_(depth), together_(std::clamp(depth / 8, 1u, 4u)) {
        for (Slot& slot : slots_) idle_.push_back(&slot);
    }

    // `memory`: what a ring is to hold; null for no ring. Tells through `ready` that it works, and whether it holds the memory.
    void serve(const std::vector<MemoryRange>* memory, std::promise<bool> ready) {
        if (memory == nullptr) {
            ready.set_value(false);
            return serve_alone();
        }
        try {
            ring_ = std::make_unique<Ring>(queue_.calls_, static_cast<unsigned>(slots_.size()));
            ready.set_value(!memory->empty() && ring_->hold(*memory) == 0);
        } catch (...) {
            return ready.set_exception(std::current_exception());
        }
        serve_ring();
    }

    void wake() {
        if (ring_ != nullptr) ring_->wake();
    }

    bool asleep = false;  // in its ring with room for blocks; the queue's mutex is for it

private:
    void serve_alone() {
        Slot& slot = slots_.front();
        while (queue_.take(&slot.block, nullptr) == Taken::block) {
            if (!begin(slot)) continue;
            ssize_t result;
            do {
                const int fd = file(slot);
                result = slot.block.writes ? queue_.calls_.write(fd, slot.here(), slot.left(), slot.offset())
                                           : queue_.calls_.read(fd, slot.here(), slot.left(), slot.offset());
            } while (!advance(slot, result));
        }
    }

    void serve_ring() {
        while (fill()) {
            const int error = ring_->submit_and_wait(idle_.empty() ? together_ : 1);
            if (error < 0) std::abort();  // the ring itself is broken: memory that the kernel may still write must not be given back
            RingCompletion completion;
            while (ring_->pop(&completion)) {
                Slot& slot = slots_[static_cast<std::size_t>(completion.user_data)];
                const std::int32_t result = queue_.calls_.ring_result(slot.block.writes, slot.left(), completion.result);
                if (advance(slot, result)) {
                    idle_.push_back(&slot);
                } else {
                    push(slot);
                }
            }
        }
    }

    // Gives idle slots blocks to do. False when the queue has stopped and nothing is under way.
    bool fill() {
        while (!idle_.empty()) {
            Slot& slot = *idle_.back();
            const Taken taken = queue_.take(&slot.block, &asleep);
            if (taken == Taken::stop) return idle_.size() < slots_.size();
            if (taken == Taken::nothing) return true;
            if (!begin(slot)) continue;
            idle_.pop_back();
            push(slot);
        }
        return true;
    }

    void push(Slot& slot) {
        ring_->push(slot.block.writes, file(slot), slot.here(), slot.left(), slot.offset(), static_cast<std::uint64_t>(&slot - slots_.data()));
    }

    int file(const Slot& slot) const { return slot.block.direct ? queue_.direct_fd_ : queue_.fd_; }

    // False when there is nothing to do any more.
    bool begin(Slot& slot) {
        Block& block = slot.block;
        if (block.request->failed_before(block.offset)) {
            finish(slot, 0);
            return false;
        }
        slot.done = 0;
        slot.bounced = block.direct && reinterpret_cast<std::uintptr_t>(block.data) % queue_.memory_alignment_ != 0;
        if (!slot.bounced) return true;
        if (slot.buffer == nullptr) {
            void* memory = nullptr;
            if (posix_memalign(&memory, kPage, queue_.block_bytes_) != 0) memory = nullptr;
            slot.buffer.reset(static_cast<char*>(memory));
        }
        if (slot.buffer == nullptr) {  // no memory: the page cache asks for no alignment
            slot.bounced = block.direct = false;
        } else if (block.writes) {
            std::memcpy(slot.buffer.get(), block.data, block.bytes);
        }
        return true;
    }

    // Takes a transfer's result. True when the block has ended.
    bool advance(Slot& slot, ssize_t result) {
        Block& block = slot.block;
        if (result == -EINTR || result == -EAGAIN) return false;
        if (result == -EINVAL && block.direct) {
            block.direct = false;
            return false;
        }
        if (result < 0) return finish(slot, static_cast<int>(-result));
        if (result == 0) return finish(slot, block.writes ? EIO : FileRequest::kShortFile);
        slot.done += static_cast<std::size_t>(result);
        if (slot.left() == 0) {
            if (slot.bounced && !block.writes) std::memcpy(block.data, slot.buffer.get(), block.bytes);
            return finish(slot, 0);
        }
        if (slot.done % kPage != 0) block.direct = false;
        return false;
    }

    bool finish(Slot& slot, int error) {
        const std::shared_ptr<FileRequest> request = std::move(slot.block.request);
        request->finish_block(error, slot.offset());
        slot.done = 0;
        return true;
    }

    FileQueue& queue_;
    std::vector<Slot> slots_;
    std::vector<Slot*> idle_;
    unsigned together_;  // completions to wait for while the ring is full: few, as requests end that much later
    std::unique_ptr<Ring> ring_;
};

FileQueue::FileQueue(const std::string& path, OpenMode mode, const QueueOptions& options, SystemCalls& calls)
    : calls_(calls), block_bytes_(options.block_bytes), owner_(getpid()) {
    open_files(path, mode, options.direct);
    try {
        start_workers(options);
    } catch (...) {
        close_files();
        throw;
    }
}

void FileQueue::open_files(const std::string& path, OpenMode mode, bool direct) {
    const int access = mode == OpenMode::read ? O_RDONLY : O_RDWR;
    const int make = mode == OpenMode::create ? O_CREAT | O_TRUNC : 0;
    fd_ = open(path.c_str(), access | make | O_CLOEXEC, 0666);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category());
#if defined(O_DIRECT)
    if (direct) direct_fd_ = open(path.c_str(), access | O_DIRECT | O_CLOEXEC);  // refused: everything through the page cache
    if (direct_fd_ >= 0) {
        memory_alignment_ = memory_alignment(direct_fd_);
        posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
    }
#else
    (void)direct;
#endif
}

void FileQueue::close_files() {
    close(fd_);
    if (direct_fd_ >= 0) close(direct_fd_);
}

void FileQueue::start_workers(const QueueOptions& options) {
    if (options.ring) {
        const unsigned workers = std::max(1u, options.workers);
        try {
            start(workers, std::max(1u, options.queue_depth / workers), &options.memory);
            uses_ring_ = true;
            return;
        } catch (const std::system_error& error) {
            ring_refusal_ = error.what();
        }
    }
    const unsigned wanted = options.workers == 0 ? 8 : options.workers;
    start(std::min(wanted, options.queue_depth), 1, nullptr);
}

// Starts threads that serve; they make their rings themselves, as these belong to a thread each. With none of them if one fails.
void FileQueue::start(unsigned workers, unsigned depth, const std::vector<MemoryRange>* memory) {
    std::vector<std::future<bool>> ready;
    holds_memory_ = memory != nullptr;
    try {
        for (unsigned k = 0; k < workers; ++k) {
            workers_.push_back(std::make_unique<Worker>(*this, depth));
            std::promise<bool> promise;
            ready.push_back(promise.get_future());
            threads_.emplace_back(&Worker::serve, workers_.back().get(), memory, std::move(promise));
        }
        for (std::future<bool>& each : ready) each.wait();
        for (std::future<bool>& each : ready) holds_memory_ &= each.get();
    } catch (...) {
        for (std::future<bool>& each : ready) {
            if (each.valid()) each.wait();  // its ring is there or not, and may be woken
        }
        stop();
        throw;
    }
}

void FileQueue::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        for (const std::unique_ptr<Worker>& worker : workers_) worker->wake();
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    workers_.clear();
    stop_ = holds_memory_ = false;
}

void FileQueue::release(FileQueue* queue) {
    if (getpid() == queue->owner_) delete queue;
}

FileQueue::~FileQueue() {
    stop();
    close_files();
}

// With `asleep`, of a worker that waits in its ring: sets it when there is nothing to do. Without, waits.
FileQueue::Taken FileQueue::take(Block* block, bool* asleep) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (asleep == nullptr) wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (asleep != nullptr) *asleep = queue_.empty();
    if (queue_.empty()) return stop_ ? Taken::stop : Taken::nothing;
    Transfer& transfer = queue_.front();
    *block = next_block(transfer);
    if (transfer.at == transfer.end) queue_.pop_front();
    return Taken::block;
}

FileQueue::Block FileQueue::next_block(Transfer& transfer) const {
    const std::size_t from = transfer.at;
    const std::size_t to = from < transfer.first ? transfer.first : from < transfer.last ? transfer.last : transfer.end;
    Block block;
    block.request = transfer.request;
    block.writes = transfer.writes;
    block.direct = from >= transfer.first && from < transfer.last;
    block.data = transfer.data + (from - transfer.begin);
    block.bytes = std::min(block_bytes_, to - from);
    block.offset = static_cast<std::int64_t>(from);
    transfer.at += block.bytes;
    return block;
}

std::shared_ptr<FileRequest> FileQueue::submit(bool writes, void* data, std::size_t bytes, std::int64_t offset) {
    auto request = std::make_shared<FileRequest>();
    const auto begin = static_cast<std::size_t>(offset), end = begin + bytes;
    const std::size_t first = uses_direct() ? std::min(end, round_up(begin, kPage)) : end;
    const std::size_t last = uses_direct() ? std::max(first, end / kPage * kPage) : end;
    std::size_t blocks = pieces(first - begin, block_bytes_) + pieces(last - first, block_bytes_) + pieces(end - last, block_bytes_);
    if (blocks == 0) return request;
    request->blocks_ = blocks;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back({request, writes, static_cast<char*>(data), begin, first, last, end, begin});
        for (const std::unique_ptr<Worker>& worker : workers_) {
            if (blocks == 0 || !worker->asleep) continue;
            worker->asleep = false;
            worker->wake();
            --blocks;
        }
    }
    wake_.notify_all();
    return request;
}

int FileQueue::sync() { return fsync(fd_) == 0 ? 0 : errno; }

}  // namespace drivetrain
