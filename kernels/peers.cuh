// How ranks hand each other their parts of a row, through memory that all of them reach.
//
// A rank writes its part into slots in the memory of every other rank, and waits for theirs in its own. The data is the flag: a word
// that holds EMPTY_WORD has not come yet, and data of these bits, which are NaN, is sent as another NaN. Words are compared as integers.
// Whoever has read a slot empties it. Where a pack lies in its slot follows from its row and its columns alone, never from the block that
// moves it, so that the grids of ranks may differ.
//
// There are two sets of slots, taken in turn, as the epoch is even or odd. The epoch lies in the memory of the device, where a graph that
// is replayed finds the next one. A rank fills a set again two calls later, in n + 2: after it has heard from all others in call n + 1,
// which they send when their call n has ended, and with it all reading and emptying of that set. (Where rows have owners it may hear of the others by an
// owner's result, which is sent when the owner has heard from all.)
//
// Order. Every access to a slot is relaxed, of system scope. A word is data or empty as a whole, and what is waited for is the data
// itself, so that no other access has to be ordered with it. What is left is that a word is emptied, by its reader, before it is filled
// two calls later. The emptying comes before what its reader sends in call n + 1, by the end of its kernel n; that is observed by the
// writer in its call n + 1, and so comes before what it sends in call n + 2. PTX's memory model would name this an order only if what is
// sent were released and what is received acquired, which costs half a microsecond a call. We rely on this instead: accesses of system
// scope to a word all take place in the L2 of the device that has it, and a kernel that has ended has nothing under way there. So do the
// other libraries that have this protocol; the stress test is what we have for it.

// One rank's part in the group. The argument beside Params: the mirror of `Peers` in rmsnorm-cuda/src/peers/params.rs, field for field.
struct Peers {
    char* send[MOST_RANKS]; // what this rank has in the memory of rank r; null for itself
    const char* receive[MOST_RANKS]; // what rank r has in the memory of this one; null for itself
    unsigned long long set_bytes; // from the slots of even epochs to those of odd ones
    struct State* state;
    unsigned* report; // in the memory of the host; as State::missing
    unsigned long long deadline; // nanoseconds
    unsigned long long first_row; // of the call's rows, or of each owner's, those of this launch
    unsigned long long rows;
    unsigned rank;
    unsigned unused;
};

static_assert(sizeof(Peers) == PEERS_BYTES, "kernels/peers.cuh and rmsnorm-cuda/src/peers/params.rs differ");

// What a rank keeps from launch to launch. All zeros at first.
struct State {
    unsigned epoch; // launches that are done
    unsigned ended; // blocks of this one that are
    unsigned missing; // a rank that did not come, plus one; 0 while all did
};

static_assert(sizeof(State) <= STATE_BYTES, "a rank's state takes more than its memory has for it");

// A pack of x is one access to a slot.
static_assert(Pack<T>::BYTES == 16, "PACK is not 16 bytes of T");

// Bytes from the slot of a thread's pack to that of its next.
constexpr int SLOT_STEP = STEP * sizeof(T);

// Polls of a slot between two looks at the clock.
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

// Nanoseconds, the same for all of a device.
__device__ inline unsigned long long clock_now() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// As it is sent. A rank takes what it sends for its own part, too, so that all add the same bits.
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

// What a thread knows of the group in one launch.
struct Group {
    const Peers& g;
    unsigned long long set; // bytes to the slots of this epoch
    unsigned long long row_bytes;
    // Sends nothing: a rank was missing before this launch. The others may still read what was sent last, and wait for more in vain.
    bool is_silent;
    // Waits for nothing: a rank is missing. What is computed from here on is of no use, and keeps the threads of a block together.
    bool has_given_up;

    __device__ Group(const Peers& g, unsigned long long cols) : g(g), row_bytes((cols + PACK - 1) / PACK * 16) {
        set = load_state(&g.state->epoch) % 2 * g.set_bytes;
        is_silent = has_given_up = load_state(&g.state->missing) != 0;
    }

    // Bytes from the first slot to that of a row's columns. Rows count from the first of the launch.
    __device__ unsigned long long slot(unsigned long long row, unsigned first) const {
        return set + row * row_bytes + (unsigned long long)first / PACK * 16;
    }

    __device__ void send(unsigned long long slot, const Pack<T>& part) const {
        if (is_silent) return;
        #pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
            if (rank != g.rank) store_slot(g.send[rank] + slot, part);
    }

    // The same to one rank, by one thread.
    __device__ void send_to(unsigned rank, unsigned long long slot, const Pack<T>& part) const {
        if (!is_silent) store_slot(g.send[rank] + slot, part);
    }

    // What one rank has sent, once it is there.
    __device__ Pack<T> receive_from(unsigned rank, unsigned long long slot) {
        Pack<T> parts[1];
        receive_from(rank, slot, [](int) { return true; }, parts);
        return parts[0];
    }

    // The same of up to COUNT packs of a thread; `exists` says which are to come. A rank that must wait itself before it sends has as many
    // deadlines as PATIENCE says: who keeps it waiting is found out first.
    template <unsigned PATIENCE = 1, int COUNT, class Exists>
    __device__ void receive_from(unsigned rank, unsigned long long slot, const Exists& exists, Pack<T> (&parts)[COUNT]) {
        const char* from = g.receive[rank] + slot;
        unsigned long long start = 0;
        for (unsigned polls = 1;; ++polls) {
            bool is_missing = false;
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (exists(i)) parts[i] = load_slot(from + i * SLOT_STEP);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (exists(i)) is_missing |= has_empty(parts[i]);
            if (!is_missing || has_given_up) break;
            if (polls % POLLS_PER_LOOK != 0) continue;
            const unsigned long long now = clock_now();
            if (start == 0) start = now;
            if (load_state(&g.state->missing) != 0) has_given_up = true;
            else if ((now - start) / PATIENCE > g.deadline) say_missing(rank + 1);
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (exists(i)) store_slot(from + i * SLOT_STEP, empty_slot());
    }

    // Fills in the parts of the other ranks, of up to COUNT packs of a thread, once they are there; `exists` says which packs are to come.
    template <int COUNT, class Exists>
    __device__ void receive(unsigned long long slot, const Exists& exists, Pack<T> (&parts)[COUNT][RANKS]) {
        unsigned long long start = 0;
        for (unsigned polls = 1;; ++polls) {
            bool is_missing = false;
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                #pragma unroll
                for (int rank = 0; rank < RANKS; ++rank)
                    if (rank != g.rank && exists(i)) parts[i][rank] = load_slot(g.receive[rank] + slot + i * SLOT_STEP);
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

    // The last block of a launch moves the epoch on. All threads of the block have read it: they have met at a barrier since.
    __device__ void end() const {
        if (threadIdx.x == 0 && atomicAdd(&g.state->ended, 1) == gridDim.x - 1) {
            g.state->ended = 0;
            ++g.state->epoch;
        }
    }

private:
    // Says which rank did not come: the first that anybody misses, to this device and to the host.
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
