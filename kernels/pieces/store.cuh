// After the norm: y is stored.
struct Store {
    static constexpr bool GOES_ON = false;
    // What waits for the norm in registers.
    struct Held {};

    template <Hint HINT>
    __device__ static Held load(const At&, int) { return {}; }

    __device__ static Held put(const At& at, int k, const float (&y)[PACK], Held) {
        store_pack(AT(y), k, at.left, pack<T>(y));
        return {};
    }

    // Calls `run` with the next norm and what it normalizes, if there is one.
    template <class Sums, class Run>
    __device__ static void then(Sums&&, const Run&) {}

    // What waits in shared memory.
    struct Slot {
        __device__ void start(const At&, int) {}
        __device__ void put(const At& at, int k, const float (&y)[PACK]) { Store::put(at, k, y, {}); }
    };
};
