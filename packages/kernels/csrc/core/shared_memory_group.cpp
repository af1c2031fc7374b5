#include "shared_memory_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace drivetrain {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::uint64_t kLag = 2;  // messages between dealing a step of an all-reduce and sharing its result: time for the others to answer

constexpr std::size_t rounded_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

// Bytes of [start, start + length) that lie below `end`.
constexpr std::size_t clipped(std::size_t end, std::size_t start, std::size_t length) {
    return start >= end ? 0 : std::min(length, end - start);
}

// A slot that deals holds the parts for the other ranks, one after the other.
std::size_t place_in_slot(int owner, int reader) { return static_cast<std::size_t>(reader < owner ? reader : reader - 1); }

void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

enum class RingState : std::uint32_t { open = 0, closed = 1, failed = 2 };

// The head of a segment; headers and slots follow. All zero, as new memory is, is the state at the start.
struct SharedMemoryGroup::Ring {
    std::uint64_t key;
    alignas(kLine) std::atomic<std::uint64_t> published;  // messages, by its owner
    alignas(kLine) std::atomic<std::uint64_t> consumed;   // messages of all rings, by its owner
    alignas(kLine) std::atomic<RingState> state;

    CallHeader* headers() { return reinterpret_cast<CallHeader*>(this + 1); }
};

bool SharedMemoryWork::wait(int milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return done_; });
}

Outcome SharedMemoryWork::outcome() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return outcome_;
}

void SharedMemoryWork::finish(const Outcome& outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outcome_ = outcome;
    done_ = true;
    finished_.notify_all();
}

std::size_t SharedMemoryGroup::segment_bytes(const RingShape& shape) {
    return rounded_up(sizeof(Ring) + shape.slots * sizeof(CallHeader), 4096) + shape.slots * shape.slot_bytes;
}

std::uint64_t& SharedMemoryGroup::key(char* segment) { return reinterpret_cast<Ring*>(segment)->key; }

SharedMemoryGroup::SharedMemoryGroup(int rank, const RingShape& shape, std::vector<PeerLink> links)
    : rank_(rank), shape_(shape), links_(std::move(links)), parts_(links_.size()) {
    const std::size_t least = kLine * std::max<std::size_t>(links_.size() - 1, 1);
    if (shape.slots < 2 || shape.slot_bytes % kLine != 0 || shape.slot_bytes < least) throw std::invalid_argument("shape of the ring");
}

SharedMemoryGroup::~SharedMemoryGroup() = default;

SharedMemoryGroup::Ring& SharedMemoryGroup::ring(int rank) const {
    return *std::launder(reinterpret_cast<Ring*>(links_[static_cast<std::size_t>(rank)].segment));
}

char* SharedMemoryGroup::slot(int rank, std::uint64_t message) const {
    const std::size_t start = segment_bytes(shape_) - shape_.slots * shape_.slot_bytes;
    return links_[static_cast<std::size_t>(rank)].segment + start + message % shape_.slots * shape_.slot_bytes;
}

// ---------------------------------------------------------------------------------------------------------------- issue

std::shared_ptr<SharedMemoryWork> SharedMemoryGroup::submit(const CallRequest& request) {
    Call call{};
    call.header = request.header;
    call.input = static_cast<const char*>(request.input);
    call.output = static_cast<char*>(request.output);
    call.work = std::make_shared<SharedMemoryWork>();
    plan(call);
    const std::lock_guard<std::mutex> lock(incoming_mutex_);
    call.header.sequence = sequence_++;
    incoming_.push_back(call);
    return call.work;
}

std::uint64_t SharedMemoryGroup::progress() const { return ring(rank_).published.load() + ring(rank_).consumed.load(); }

void SharedMemoryGroup::expire(const std::shared_ptr<SharedMemoryWork>& work) {
    const std::lock_guard<std::mutex> lock(incoming_mutex_);
    expired_.push_back(work);
}

void SharedMemoryGroup::plan(Call& call) const {
    const std::size_t bytes = call.header.bytes, others = static_cast<std::size_t>(size()) - 1;
    const std::size_t dealt = shape_.slot_bytes / others / kLine * kLine;
    const CallKind kind = call.header.kind;
    call.in_two_rounds = kind == CallKind::all_reduce && bytes > shape_.slot_bytes;
    call.slice = rounded_up((bytes + others) / (others + 1), kLine);
    const bool deals = call.in_two_rounds || kind == CallKind::all_to_all || kind == CallKind::reduce_scatter;
    call.part = deals ? dealt : shape_.slot_bytes;
    const std::size_t longest = call.in_two_rounds ? call.slice : bytes;
    call.steps = std::max<std::uint64_t>(1, (longest + call.part - 1) / call.part);
    call.messages = call.in_two_rounds ? 2 * call.steps : call.steps;
}

// The bytes that belong to `owner`, in the buffer that holds the pieces of all.
SharedMemoryGroup::Piece SharedMemoryGroup::piece(const Call& call, int owner) const {
    const auto index = static_cast<std::size_t>(owner);
    if (call.in_two_rounds) return {index * call.slice, clipped(call.header.bytes, index * call.slice, call.slice)};
    if (call.header.kind == CallKind::broadcast || call.header.kind == CallKind::all_reduce) return {0, call.header.bytes};
    return {index * call.header.bytes, call.header.bytes};
}

// An all-reduce in two rounds begins with kLag deals, goes on with a deal and a share in turn, and ends with kLag shares.
SharedMemoryGroup::Turn SharedMemoryGroup::turn(const Call& call, std::uint64_t message) const {
    if (!call.in_two_rounds) {
        return {call.header.kind == CallKind::all_to_all || call.header.kind == CallKind::reduce_scatter, message};
    }
    const std::uint64_t lag = std::min(kLag, call.steps), middle = 2 * (call.steps - lag);
    if (message < lag) return {true, message};
    if (message >= lag + middle) return {false, message - lag - middle + call.steps - lag};
    const std::uint64_t place = message - lag;
    return place % 2 == 0 ? Turn{true, lag + place / 2} : Turn{false, place / 2};
}

// How many messages of the call must have been consumed here before this one can be published.
std::uint64_t SharedMemoryGroup::needed(const Call& call, std::uint64_t message) const {
    const Turn now = turn(call, message);
    if (!call.in_two_rounds || now.deals) return 0;
    const std::uint64_t lag = std::min(kLag, call.steps);
    return now.step < lag ? now.step + 1 : lag + 2 * (now.step - lag) + 1;
}

// ------------------------------------------------------------------------------------------------------------- progress

bool SharedMemoryGroup::step() {
    accept();
    const bool published = publish_one(), consumed = consume_one();
    return published || consumed;
}

void SharedMemoryGroup::accept() {
    std::vector<Call> incoming;
    std::vector<std::shared_ptr<SharedMemoryWork>> expired;
    {
        const std::lock_guard<std::mutex> lock(incoming_mutex_);
        incoming.swap(incoming_);
        expired.swap(expired_);
    }
    for (Call& call : incoming) {
        if (broken_.trouble != Trouble::none) {
            call.work->finish(broken_);
            continue;
        }
        call.first = planned_;
        planned_ += call.messages;
        calls_.push_back(std::move(call));
    }
    for (const std::shared_ptr<SharedMemoryWork>& work : expired) {
        const auto found = std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) { return call.work == work; });
        if (found == calls_.end()) continue;
        const std::vector<int> waited_for = blockers();
        if (!waited_for.empty()) fail({Trouble::late, waited_for.front(), {}, {}});  // else this rank itself was stopped for that long
    }
}

bool SharedMemoryGroup::publish_one() {
    if (publishing_ == calls_.size()) return false;
    Call& call = calls_[publishing_];
    const std::uint64_t message = call.first + call.published;
    if (needed(call, call.published) > call.consumed || !room_for(message)) return false;
    Ring& own = ring(rank_);
    own.headers()[message % shape_.slots] = call.header;
    write(call, call.published);
    own.published.store(message + 1);
    ring_all();
    if (++call.published == call.messages) ++publishing_;
    return true;
}

bool SharedMemoryGroup::consume_one() {
    if (calls_.empty()) return false;
    Call& call = calls_.front();
    const std::uint64_t message = call.first + call.consumed;
    if (call.consumed == call.published || !published_by_all(message)) return false;
    if (call.consumed == 0 && !agrees(call)) return true;
    read(call, call.consumed);
    ring(rank_).consumed.store(message + 1);
    ring_all();
    if (++call.consumed < call.messages) return true;
    call.work->finish({});
    calls_.pop_front();
    --publishing_;
    return true;
}

bool SharedMemoryGroup::room_for(std::uint64_t message) const {
    for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank_ && message >= ring(peer).consumed.load() + shape_.slots) return false;
    }
    return true;
}

bool SharedMemoryGroup::published_by_all(std::uint64_t message) const {
    for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank_ && ring(peer).published.load() <= message) return false;
    }
    return true;
}

bool SharedMemoryGroup::agrees(const Call& call) {
    for (int step = 1; step < size(); ++step) {
        const int peer = (rank_ + step) % size();
        const CallHeader& theirs = ring(peer).headers()[call.first % shape_.slots];
        if (std::memcmp(&theirs, &call.header, sizeof theirs) != 0) {
            fail({Trouble::differs, peer, call.header, theirs});
            return false;
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------- bytes

void SharedMemoryGroup::write(const Call& call, std::uint64_t message) const {
    const Turn now = turn(call, message);
    const std::size_t start = now.step * call.part;
    char* to = slot(rank_, call.first + message);
    const CallKind kind = call.header.kind;
    const Piece own = piece(call, rank_);
    if (now.deals) {
        const char* from = kind == CallKind::all_reduce ? call.output : call.input;
        for (int peer = 0; peer < size(); ++peer) {
            if (peer == rank_) continue;
            const Piece theirs = piece(call, peer);
            copy(to + place_in_slot(rank_, peer) * call.part, from + theirs.begin + start, clipped(theirs.bytes, start, call.part));
        }
        if (kind == CallKind::all_to_all) {
            copy(call.output + own.begin + start, call.input + own.begin + start, clipped(own.bytes, start, call.part));
        }
        return;
    }
    const std::size_t bytes = clipped(own.bytes, start, call.part);
    if (kind == CallKind::all_gather) {
        copy(to, call.input + start, bytes);
        copy(call.output + own.begin + start, call.input + start, bytes);
    } else if (kind == CallKind::all_reduce || call.header.root == static_cast<std::uint32_t>(rank_)) {
        copy(to, call.output + own.begin + start, bytes);
    }
}

void SharedMemoryGroup::read(const Call& call, std::uint64_t message) {
    const Turn now = turn(call, message);
    const CallKind kind = call.header.kind;
    if (kind == CallKind::reduce_scatter || (kind == CallKind::all_reduce && (now.deals || !call.in_two_rounds))) {
        fold_step(call, now, message);
        return;
    }
    const std::size_t start = now.step * call.part;
    for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank_ || (kind == CallKind::broadcast && call.header.root != static_cast<std::uint32_t>(peer))) continue;
        const Piece theirs = piece(call, peer);
        const std::size_t place = now.deals ? place_in_slot(peer, rank_) * call.part : 0;
        copy(call.output + theirs.begin + start, slot(peer, call.first + message) + place, clipped(theirs.bytes, start, call.part));
    }
}

void SharedMemoryGroup::fold_step(const Call& call, const Turn& now, std::uint64_t message) {
    const Piece own = piece(call, rank_);
    const std::size_t start = now.step * call.part, bytes = clipped(own.bytes, start, call.part);
    const bool in_place = call.header.kind == CallKind::all_reduce;
    const char* mine = (in_place ? call.output : call.input) + own.begin + start;
    char* to = call.output + (in_place ? own.begin : 0) + start;
    for (int peer = 0; peer < size(); ++peer) {
        const std::size_t place = now.deals ? place_in_slot(peer, rank_) * call.part : 0;
        parts_[static_cast<std::size_t>(peer)] = peer == rank_ ? mine : slot(peer, call.first + message) + place;
    }
    const auto type = static_cast<FoldType>(call.header.type);
    fold(type, static_cast<FoldOp>(call.header.op), parts_.data(), parts_.size(), bytes / size_of(type), to);
}

// -------------------------------------------------------------------------------------------------------------- failure

// The other ranks that the group waits for.
std::vector<int> SharedMemoryGroup::blockers() const {
    std::vector<int> found;
    if (calls_.empty()) return found;
    const Call& front = calls_.front();
    const bool reads = front.consumed < front.published;
    const std::uint64_t to_consume = front.first + front.consumed;
    const bool writes = publishing_ < calls_.size();
    const std::uint64_t to_publish = writes ? calls_[publishing_].first + calls_[publishing_].published : 0;
    for (int step = 1; step < size(); ++step) {
        const int peer = (rank_ + step) % size();
        const bool silent = reads && ring(peer).published.load() <= to_consume;
        const bool full = writes && to_publish >= ring(peer).consumed.load() + shape_.slots;
        if (silent || full) found.push_back(peer);
    }
    return found;
}

void SharedMemoryGroup::check_peers(bool ask_processes) {
    Outcome found;
    const auto note = [&found](Trouble trouble, int peer) {
        if (found.trouble == Trouble::none || trouble == Trouble::ended) found = {trouble, peer, {}, {}};
    };
    for (const int peer : blockers()) {
        const RingState state = ring(peer).state.load();
        if (state == RingState::closed) note(Trouble::closed, peer);
        if (state == RingState::failed) note(Trouble::failed, peer);
        if (ask_processes && !links_[static_cast<std::size_t>(peer)].alive()) note(Trouble::ended, peer);
    }
    if (found.trouble == Trouble::none) return;
    // It may have done its part just before.
    const std::vector<int> still = blockers();
    if (std::find(still.begin(), still.end(), found.peer) == still.end()) return;
    if (found.trouble == Trouble::failed) {  // perhaps because of one that has ended
        for (int peer = 0; peer < size(); ++peer) {
            if (peer != rank_ && !links_[static_cast<std::size_t>(peer)].alive()) note(Trouble::ended, peer);
        }
    }
    fail(found);
}

void SharedMemoryGroup::close() {
    accept();
    fail({Trouble::shut_down, -1, {}, {}});
}

void SharedMemoryGroup::fail(const Outcome& outcome) {
    if (broken_.trouble == Trouble::none) broken_ = outcome;
    ring(rank_).state.store(outcome.trouble == Trouble::shut_down ? RingState::closed : RingState::failed);
    for (Call& call : calls_) call.work->finish(broken_);
    calls_.clear();
    publishing_ = 0;
    ring_all();
}

void SharedMemoryGroup::ring_all() const {
    for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank_) links_[static_cast<std::size_t>(peer)].bell->ring();
    }
}

}  // namespace drivetrain
