// Before the statistics: x alone, of type E. What every Before has: `load` makes a pack of h, `load_row` all
// packs of a thread; `store_h` and `store_h_row` store residual_out, if the call has it, after the
// last load. `Slot` is the same for rows that wait in shared memory (forward_long.cu). `First` and
// `add` are for Parts and for sums over ranks.
template <class E>
struct Plain {
    using Value = E;
    // What `add` starts from.
    using First = Plain;
    // Whether a row is read from memory once only.
    static constexpr bool IS_READ_ONCE = false;

    template <Hint HINT>
    __device__ static Pack<E> load(const At& at, int k) { return load_pack<HINT>(AT(x), k, at.left); }

    template <Hint HINT>
    __device__ static Pack<E> add(const Pack<E>& x, const At&, int) { return x; }

    // What is added to an x that is a sum itself: parts.cuh, sum_over_ranks.cuh.
    struct Addend {};

    template <Hint HINT>
    __device__ static Addend load_addend(const At&, int) { return {}; }

    __device__ static void add_to(float (&)[PACK], Addend) {}
    __device__ static Pack<E> add(const Pack<E>& x, Addend) { return x; }

    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<E> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = load<HINT>(at, k);
    }

    // Stores h if the call wants to have it. After the last load of the row: in place
    // residual_out overwrites x or the residual.
    template <class Of>
    __device__ static void store_h(const At&, int, const Pack<Of>&) {}
    template <class Of>
    __device__ static void store_h_row(const At&, const Pack<Of> (&)[PACKS]) {}

    // A row in shared memory. Adjacent threads have adjacent packs, so that banks do not conflict.
    struct Slot {
        Pack<E> x[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&x[k][threadIdx.x], AT(x), k, at.left); }
        __device__ void finish(const At&) {}
        __device__ Pack<E> pack(int k) const { return x[k][threadIdx.x]; }
    };
};

// x of the activations' type. A cast has x of the residual stream's.
using X = Plain<T>;
