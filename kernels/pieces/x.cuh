// Before the statistics: x alone. What every Before has: `load` makes a pack of h, `load_row` all
// packs of a thread; `store_h` and `store_h_row` store residual_out, if the call has it, after the
// last load. `Slot` is the same for rows that wait in shared memory (forward_long.cu). `First` and
// `add` are for Parts and for sums over ranks.
struct X {
    using Value = T;
    // What `add` starts from.
    using First = X;
    // Whether a row is read from memory once only.
    static constexpr bool IS_READ_ONCE = false;

    template <Hint HINT>
    __device__ static Pack<T> load(const At& at, int k) { return load_pack<HINT>(AT(x), k, at.left); }

    template <Hint HINT>
    __device__ static Pack<T> add(const Pack<T>& x, const At&, int) { return x; }

    // What is added to an x that is a sum itself: parts.cuh, sum_over_ranks.cuh.
    struct Addend {};

    template <Hint HINT>
    __device__ static Addend load_addend(const At&, int) { return {}; }

    __device__ static void add_to(float (&)[PACK], Addend) {}
    __device__ static Pack<T> add(const Pack<T>& x, Addend) { return x; }

    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<T> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = load<HINT>(at, k);
    }

    // Stores h if the call wants to have it. After the last load of the row: in place
    // residual_out overwrites x or the residual.
    template <class E>
    __device__ static void store_h(const At&, int, const Pack<E>&) {}
    template <class E>
    __device__ static void store_h_row(const At&, const Pack<E> (&)[PACKS]) {}

    // A row in shared memory. Adjacent threads have adjacent packs, so that banks do not conflict.
    struct Slot {
        Pack<T> x[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&x[k][threadIdx.x], AT(x), k, at.left); }
        __device__ void finish(const At&) {}
        __device__ Pack<T> pack(int k) const { return x[k][threadIdx.x]; }
    };
};
