// After the norm: y is stored. What every After has: `load` is called before the statistics, or
// pack by pack after them, and gives what waits for the norm; `put` takes the normalized values and
// what waited, and returns what the next norm normalizes; `then` runs that norm. `Slot` is the same
// where it waits in shared memory (forward_long.cu), and `load_sum` reads a stored sum back
// (forward_streaming.cu, if GOES_ON). Where codes are made of y, `turn` makes y, which IS_NORM if that
// does nothing.
struct Store {
    static constexpr bool GOES_ON = false, IS_NORM = true;
    // What waits for the norm in registers.
    struct Waiting {};

    template <Hint HINT>
    __device__ static Waiting load(const At&, int) { return {}; }

    __device__ static void turn(float (&)[PACK], Waiting) {}

    __device__ static Waiting put(const At& at, int k, const float (&y)[PACK], Waiting) {
        store_pack(AT(y), k, at.left, pack<T>(y));
        return {};
    }

    // Calls `run` with the next norm and what it normalizes, if there is one.
    template <class Kept, class Run>
    __device__ static void then(Kept&&, const Run&) {}

    // What waits in shared memory.
    struct Slot {
        __device__ void start(const At&, int) {}
        __device__ void put(const At& at, int k, const float (&y)[PACK]) { Store::put(at, k, y, {}); }
    };
};
