// Asynchronous reads and writes between one file and memory.
//
// Problem: storage is fast only with many large requests under way at once that go past the page cache, and direct requests must be
// aligned in the file and in memory, which tensors are not.
// Idea: a request is cut into blocks at aligned file offsets, one after another as workers take them. The odd head and tail go through
// the page cache; aligned blocks go directly, from or to the caller's memory where that is aligned too, else through a buffer of the
// worker. With io_uring each worker keeps a ring full, and wakes for several completions at a time while it is; without it each does
// one block at a time. Memory that the caller declares is held by the kernel for good, which saves its look-up in each transfer.
// Direct parts are whole pages even where the drive would take less, and the page cache reads nothing ahead: a page that is written
// directly while the cache holds it dirty or is reading it may lose data (Linux then fails the next fsync with EIO).
// Invariants: a transfer that was cut short goes on where it stopped; what the direct path refuses is tried through the page cache; a
// request ends only when none of its blocks is under way, so that its memory may then go; the error of a request is that of its first
// block in the file that failed, and blocks after one that failed are not started. Requests that overlap have no order. A forked child leaves everything of its parent alone.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "system_calls.h"

namespace drivetrain {

enum class OpenMode : std::uint8_t { read = 0, create = 1, update = 2 };  // O_RDONLY; O_RDWR and empty; O_RDWR

struct QueueOptions {
    std::size_t block_bytes;  // a multiple of 4096
    unsigned queue_depth;     // blocks under way, over all workers
    unsigned workers;         // 0: one with io_uring, eight without
    bool direct;              // try O_DIRECT
    bool ring;                // try io_uring
    std::vector<MemoryRange> memory = {};  // what rings are to hold, as long as the queue is there
};

class FileRequest {
public:
    // Waits. Returns 0 or the error number of the failure with the lowest offset; `kShortFile` when a read went past the end.
    int wait();
    bool done();
    std::int64_t failed_at();  // file offset of the failure

    static constexpr int kShortFile = -1;

private:
    friend class FileQueue;
    void finish_block(int error, std::int64_t offset);
    bool failed_before(std::int64_t offset);

    std::mutex mutex_;
    std::condition_variable finished_;
    std::size_t blocks_ = 0;
    int error_ = 0;
    std::int64_t failed_at_ = 0;
};

class FileQueue {
public:
    // Throws std::system_error when the file can't be opened.
    FileQueue(const std::string& path, OpenMode mode, const QueueOptions& options, SystemCalls& calls = SystemCalls::real());
    FileQueue(const FileQueue&) = delete;
    FileQueue& operator=(const FileQueue&) = delete;
    ~FileQueue();  // waits for everything under way; never called in a forked child, see `release`

    // Deletes the queue; in a forked child leaves it as it is: its threads and the locks they may hold stayed with the parent.
    static void release(FileQueue* queue);

    std::shared_ptr<FileRequest> submit(bool writes, void* data, std::size_t bytes, std::int64_t offset);
    int sync();  // fsync: 0 or an error number

    bool uses_ring() const { return uses_ring_; }
    bool uses_direct() const { return direct_fd_ >= 0; }
    const std::string& ring_refusal() const { return ring_refusal_; }
    bool holds_memory() const { return holds_memory_; }

private:
    struct Block;
    struct Transfer;
    struct Slot;
    class Worker;
    enum class Taken : std::uint8_t { block, nothing, stop };

    void open_files(const std::string& path, OpenMode mode, bool direct);
    void close_files();
    void start_workers(const QueueOptions& options);
    void start(unsigned workers, unsigned depth, const std::vector<MemoryRange>* memory);
    void stop();
    Block next_block(Transfer& transfer) const;
    Taken take(Block* block, bool* asleep);

    SystemCalls& calls_;
    std::size_t block_bytes_, memory_alignment_ = 4096;
    int fd_ = -1, direct_fd_ = -1;
    bool uses_ring_ = false, holds_memory_ = false;
    std::string ring_refusal_;
    std::int64_t owner_;  // process id

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Transfer> queue_;
    bool stop_ = false;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<std::thread> threads_;
};

}  // namespace drivetrain
