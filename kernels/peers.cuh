// Exchange of parts of rows between ranks, through memory that all of them can access.
//
// A rank writes its part into slots in the memory of every other rank, and waits for the other
// ranks' parts in its own memory. The data is the flag: a word with the bits EMPTY_WORD has not
// arrived. Data with these bits, a NaN, is sent as another NaN. Words are compared as integers. The
// reader of a slot empties it. The place of a pack in its slot depends only on its row and columns,
// never on the block that sends it, so the grids of ranks may differ.
//
// There are two sets of slots, used in turn for even and odd epochs. The epoch lies in device
// memory, so that a replayed graph finds the next one. A rank fills a set again two calls later, in
// call n + 2: after it has received from all others in call n + 1. They send in call n + 1 after
// their call n has ended, and with it all reading and emptying of that set. (If there are owners, a
// rank may hear of the others through an owner's result, which the owner sends after it has
// received from all.)
//
// Memory order. Every access to a slot is relaxed, with system scope. A word is data or empty as a
// whole, and the awaited value is the data itself, so no other access must be ordered with it. One
// order remains: a reader empties a word before the writer fills it two calls later. The emptying
// precedes the reader's sends of call n + 1, because its kernel n has ended. The writer observes
// these sends in its call n + 1, before it sends in call n + 2. PTX's memory model guarantees this
// order only with release on the sends and acquire on the receives, which costs 0.5 us per call. We
// rely on this instead: all accesses of system scope to a word take place in the L2 of the device
// that owns it, and a kernel that has ended has no accesses in flight there. Other libraries with
// this protocol rely on the same; our evidence is the stress test.

// One rank's view of the group. The second kernel argument: mirrors `Peers` in
// rmsnorm-cuda/src/peers/params.rs field by field.
struct Peers {
    char* send[MOST_RANKS]; // this rank's slots in the memory of rank r; null for itself
    const char* receive[MOST_RANKS]; // rank r's slots in the memory of this rank; null for itself
    unsigned long long set_bytes; // distance of the two sets of slots
    struct State* state;
    unsigned* report; // in host memory; holds the same as State::missing
    unsigned long long deadline; // nanoseconds
    unsigned long long first_row; // of this launch, among the call's or each owner's rows
    unsigned long long rows;
    unsigned rank;
    unsigned admits_next; // whether the next kernel may start when all blocks of this one run
};

static_assert(sizeof(Peers) == PEERS_BYTES, "kernels/peers.cuh and rmsnorm-cuda/src/peers/params.rs differ");

// The state of a rank, kept between launches. Initially zeros.
struct State {
    unsigned epoch; // finished launches
    unsigned ended; // finished blocks of the current launch
    unsigned missing; // 1 + a rank that timed out; 0 if none did
};

static_assert(sizeof(State) <= STATE_BYTES, "State is larger than STATE_BYTES");

// A pack of x is one access to a slot.
static_assert(Pack<T>::BYTES == 16, "PACK is not 16 bytes of T");

// Bytes from the slot of one pack of a thread to the next.
constexpr int SLOT_STEP = STEP * sizeof(T);

// Whether a wait for all ranks loads only slots that were empty. With many ranks more loads delay the
// data. 64 rows of 8192 on eight ranks take 18.3 us with it and 20.0 us without. On two ranks they
// take 6.51 and 6.39 us.
constexpr bool LOADS_MISSING = RANKS > 4;

// Polls of a slot between two reads of the clock.
constexpr unsigned POLLS_PER_LOOK = 64;

__device__ inline Pack<T> load_slot(const char* from) {
    Pack<T> pack;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3]) : "l"(from) : "memory");
    return pack;
}

__device__ inline void store_slot(const char* to, const Pack<T>& pack) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3]) : "memory");
}

__device__ inline unsigned load_state(const unsigned* from) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Nanoseconds; one clock for the whole device.
__device__ inline unsigned long long clock_now() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Replaces words that look empty. A rank applies it to its own part too, so that all ranks add the
// same bits.
__device__ inline Pack<T> without_empty(Pack<T> pack) {
    constexpr unsigned OTHER_NAN = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        if (pack.words[i] == unsigned(EMPTY_WORD)) pack.words[i] = OTHER_NAN;
    return pack;
}

__device__ inline bool has_empty(const Pack<T>& pack) {
    bool is_any = false;
    #pragma unroll
    for (int i = 0; i < 4; ++i) is_any |= pack.words[i] == unsigned(EMPTY_WORD);
    return is_any;
}

__device__ inline Pack<T> empty_slot() {
    Pack<T> empty;
    #pragma unroll
    for (int word = 0; word < 4; ++word) empty.words[word] = unsigned(EMPTY_WORD);
    return empty;
}

// Lets the next kernel start early, if this launch may. Where it is called matters: in sums before the
// first sends it costs 0.1 us, in forward_exchange.cu after them 0.2 us.
__device__ inline void admit_next(const Peers& g) {
    if (g.admits_next) admit_next_kernel();
}

// A thread's view of the group in one launch.
struct Group {
    const Peers& g;
    unsigned long long set; // offset of this epoch's slots
    unsigned long long row_bytes;
    // Sends nothing, because a rank was missing before this launch. Others may still read the
    // previous data, and their wait for more times out.
    bool is_silent;
    // Waits for nothing, because a rank is missing. Results from here on are meaningless; computing
    // goes on to keep the threads of a block together.
    bool has_given_up;

    __device__ Group(const Peers& g, unsigned long long cols) : g(g), row_bytes((cols + PACK - 1) / PACK * 16) {
        set = load_state(&g.state->epoch) % 2 * g.set_bytes;
        is_silent = has_given_up = load_state(&g.state->missing) != 0;
    }

    // The offset of the slot for a row and its columns from `first` on. `row` counts from the first
    // row of the launch.
    __device__ unsigned long long slot(unsigned long long row, unsigned first) const {
        return set + row * row_bytes + (unsigned long long)first / PACK * 16;
    }

    __device__ void send(unsigned long long slot, const Pack<T>& part) const {
        if (is_silent) return;
        #pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
            if (rank != g.rank) store_slot(g.send[rank] + slot, part);
    }

    // Sends to one rank; called by one thread.
    __device__ void send_to(unsigned rank, unsigned long long slot, const Pack<T>& part) const {
        if (!is_silent) store_slot(g.send[rank] + slot, part);
    }

    // Waits for one rank's slot and returns it.
    __device__ Pack<T> receive_from(unsigned rank, unsigned long long slot) {
        Pack<T> parts[1];
        receive_from([&](int) { return rank; }, slot, [](int) { return true; }, parts);
        return parts[0];
    }

    // Waits for up to COUNT packs of a thread, pack i from rank `from(i)`; `exists(i)` tells which
    // are expected. If the sender itself must wait for others, PATIENCE multiplies the deadline, so
    // that the rank that it waits for is reported first.
    template <unsigned PATIENCE = 1, int COUNT, class From, class Exists>
    __device__ void receive_from(const From& from, unsigned long long slot, const Exists& exists, Pack<T> (&parts)[COUNT]) {
        const auto slot_of = [&](int i) { return g.receive[from(i)] + slot + i * SLOT_STEP; };
        unsigned long long start = 0;
        for (unsigned polls = 1;; ++polls) {
            unsigned missing = 0; // 1 + a rank
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (exists(i)) parts[i] = load_slot(slot_of(i));
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (exists(i) && has_empty(parts[i])) missing = from(i) + 1;
            if (missing == 0 || has_given_up) break;
            if (polls % POLLS_PER_LOOK != 0) continue;
            const unsigned long long now = clock_now();
            if (start == 0) start = now;
            if (load_state(&g.state->missing) != 0) has_given_up = true;
            else if ((now - start) / PATIENCE > g.deadline) say_missing(missing);
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (exists(i)) store_slot(slot_of(i), empty_slot());
    }

    // Waits for up to COUNT packs of a thread from every other rank and fills in their parts;
    // `exists(i)` tells which packs are expected.
    template <int COUNT, class Exists>
    __device__ void receive(unsigned long long slot, const Exists& exists, Pack<T> (&parts)[COUNT][RANKS]) {
        unsigned long long start = 0;
        for (unsigned polls = 1;; ++polls) {
            bool is_missing = false;
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                #pragma unroll
                for (int rank = 0; rank < RANKS; ++rank)
                    if (rank != g.rank && exists(i) && (!LOADS_MISSING || polls == 1 || has_empty(parts[i][rank])))
                        parts[i][rank] = load_slot(g.receive[rank] + slot + i * SLOT_STEP);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                #pragma unroll
                for (int rank = 0; rank < RANKS; ++rank)
                    if (rank != g.rank && exists(i)) is_missing |= has_empty(parts[i][rank]);
            if (!is_missing || has_given_up) break;
            if (polls % POLLS_PER_LOOK != 0) continue;
            const unsigned long long now = clock_now();
            if (start == 0) start = now;
            if (load_state(&g.state->missing) != 0) has_given_up = true;
            else if (now - start > g.deadline) give_up(exists, parts);
        }
        const Pack<T> empty = empty_slot();
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            #pragma unroll
            for (int rank = 0; rank < RANKS; ++rank)
                if (rank != g.rank && exists(i)) store_slot(g.receive[rank] + slot + i * SLOT_STEP, empty);
    }

    // The last block of a launch advances the epoch. All threads of the block must have read it: a
    // barrier must precede this call.
    __device__ void end() const {
        if (threadIdx.x == 0 && atomicAdd(&g.state->ended, 1) == gridDim.x - 1) {
            g.state->ended = 0;
            ++g.state->epoch;
        }
    }

private:
    // Reports a missing rank to the device and the host: the lowest one that the first thread to
    // give up misses.
    template <int COUNT, class Exists>
    __device__ void give_up(const Exists& exists, const Pack<T> (&parts)[COUNT][RANKS]) {
        unsigned missing = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            #pragma unroll
            for (int rank = RANKS - 1; rank >= 0; --rank)
                if (rank != g.rank && exists(i) && has_empty(parts[i][rank])) missing = rank + 1;
        say_missing(missing);
    }

    __device__ void say_missing(unsigned missing) {
        if (atomicCAS(&g.state->missing, 0, missing) == 0)
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(g.report), "r"(missing) : "memory");
        has_given_up = true;
    }
};
