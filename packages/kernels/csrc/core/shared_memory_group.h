// Collectives among the ranks of one host, through memory that they share.
//
// Problem: between processes of one host a socket copies every byte twice in the kernel and once more to fold it, and wakes both sides for
// each piece.
// Idea: every rank owns a ring of slots that all others read. A collective is a fixed sequence of messages, the same on all ranks: a rank
// copies its part of message m to its slot m % slots, and once all others have done so reads theirs: it folds them straight into the result,
// or copies them to where they belong. So a byte is written once, whoever reads it, and read out of a cache. Two counters per rank are
// all the synchronisation: how many messages it has published, and how many it has consumed.
// Invariants:
// - calls run in the order of their issue, messages in their order; a rank publishes up to `slots` messages ahead of the slowest reader, also
//   those of later calls;
// - message m is published only when all ranks have consumed message m - slots, and is consumed only when all ranks have published it, so
//   that by induction over m no order of events can block all ranks for good;
// - the first message of a call carries its header, and nothing of the call is consumed before all headers are found equal;
// - the progress thread alone touches calls and tensors; a call that has ended, however, is not touched again;
// - what a rank published stays readable when it ends: only who still needs something from it fails.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fold.h"
#include "shared_memory_segment.h"

namespace drivetrain {

// The numbers are part of the interface with Python (shared_memory.py).
enum class CallKind : std::uint8_t { all_gather = 0, broadcast = 1, all_to_all = 2, reduce_scatter = 3, all_reduce = 4 };
enum class Trouble : std::uint8_t {
    none = 0,
    ended = 1,     // the process of a peer has ended
    failed = 2,    // a peer gave up, for trouble of its own
    closed = 3,    // a peer closed its group
    differs = 4,   // a peer issued another call
    late = 5,      // a peer did nothing for too long
    shut_down = 6  // this rank closed its group
};

// What all ranks must agree on. Compared byte by byte.
struct CallHeader {
    std::uint64_t sequence;  // of calls on this group
    std::uint64_t bytes;     // of one rank's piece; of the whole for all_reduce and broadcast
    char label[192];         // how the caller names the call, and what it is for
    char dtype[24];
    CallKind kind;
    std::uint8_t type, op;   // FoldType and FoldOp where something is folded, else 0
    std::uint8_t reserved[5];
    std::uint32_t root;      // of a broadcast, else 0
    std::uint32_t reserved2[3];
};
static_assert(sizeof(CallHeader) == 256);

struct Outcome {
    Trouble trouble = Trouble::none;
    int peer = -1;
    CallHeader mine{}, theirs{};  // where `trouble` is `differs`
};

// The future of one call.
class SharedMemoryWork {
public:
    bool wait(int milliseconds);  // whether the call has ended
    Outcome outcome();            // once it has

private:
    friend class SharedMemoryGroup;
    void finish(const Outcome& outcome);

    std::mutex mutex_;
    std::condition_variable finished_;
    bool done_ = false;
    Outcome outcome_;
};

struct CallRequest {
    CallHeader header;  // `sequence` is filled in
    const void* input;
    void* output;
};

struct RingShape {
    std::size_t slot_bytes;  // a multiple of 64, and at least 64 for each other rank
    std::size_t slots;       // at least 2
};

// How one rank is reached: its segment, the bell of its progress thread, and whether it lives.
struct PeerLink {
    char* segment;  // of `segment_bytes`
    Doorbell* bell;
    std::function<bool()> alive;
};

class SharedMemoryGroup {
public:
    static std::size_t segment_bytes(const RingShape& shape);
    static std::uint64_t& key(char* segment);  // a number that its owner may write there

    // `links`: of all ranks, in their order; this rank's own too.
    SharedMemoryGroup(int rank, const RingShape& shape, std::vector<PeerLink> links);
    SharedMemoryGroup(const SharedMemoryGroup&) = delete;
    SharedMemoryGroup& operator=(const SharedMemoryGroup&) = delete;
    ~SharedMemoryGroup();

    // From any thread. Whoever drives the group must be woken after it.
    std::shared_ptr<SharedMemoryWork> submit(const CallRequest& request);
    std::uint64_t progress() const;  // grows while anything moves
    // Asks for the failure of the calls under way if `work` is still one of them, since it took too long.
    void expire(const std::shared_ptr<SharedMemoryWork>& work);

    // The rest is for the thread that drives the group.

    // Publishes and consumes at most one message. Returns whether it did anything.
    bool step();
    bool busy() const { return !calls_.empty(); }
    // When nothing moves: ends the calls if a peer that is waited for will never do its part. Asking about processes costs system calls.
    void check_peers(bool ask_processes);
    void close();

private:
    struct Ring;

    // A call under way: what `plan` made of a request.
    struct Call {
        CallHeader header;
        const char* input;
        char* output;
        std::shared_ptr<SharedMemoryWork> work;
        bool in_two_rounds;       // an all-reduce that deals slices out, and then shares what was folded of them
        std::size_t slice;        // bytes of a rank's slice of it
        std::size_t part;         // bytes of one piece that a message carries
        std::uint64_t steps;      // messages that a round takes
        std::uint64_t messages;   // of all rounds
        std::uint64_t first;      // number in the group of the first message
        std::uint64_t published;  // messages of it
        std::uint64_t consumed;
    };
    struct Piece {
        std::size_t begin, bytes;
    };
    // What a message does: every rank shows its own piece to all, or deals the others their pieces.
    struct Turn {
        bool deals;
        std::uint64_t step;
    };

    Ring& ring(int rank) const;
    char* slot(int rank, std::uint64_t message) const;
    int size() const { return static_cast<int>(links_.size()); }

    void accept();
    void plan(Call& call) const;
    Piece piece(const Call& call, int owner) const;
    Turn turn(const Call& call, std::uint64_t message) const;
    std::uint64_t needed(const Call& call, std::uint64_t message) const;

    bool publish_one();
    bool consume_one();
    bool room_for(std::uint64_t message) const;
    bool published_by_all(std::uint64_t message) const;
    bool agrees(const Call& call);
    void write(const Call& call, std::uint64_t message) const;
    void read(const Call& call, std::uint64_t message);
    void fold_step(const Call& call, const Turn& turn, std::uint64_t message);

    std::vector<int> blockers() const;
    void fail(const Outcome& outcome);
    void ring_all() const;

    int rank_;
    RingShape shape_;
    std::vector<PeerLink> links_;

    std::mutex incoming_mutex_;  // guards what follows
    std::vector<Call> incoming_;
    std::vector<std::shared_ptr<SharedMemoryWork>> expired_;
    std::uint64_t sequence_ = 0;

    std::deque<Call> calls_;      // issued, not complete
    std::size_t publishing_ = 0;  // the first of them that is not all published
    std::uint64_t planned_ = 0;   // messages of all calls so far
    Outcome broken_;
    std::vector<const void*> parts_;
};

}  // namespace drivetrain
