// What pieces do in backward. What follows the norm in forward turns dy before the sums over the
// row (`AfterPull`). What comes before it makes h, and turns dx at the end (`BeforePull`).
// rmsnorm-cuda/src/source.rs chooses both types: those of this file, or of a piece with a gradient
// of its own.
//
// A matrix that a piece reads waits in its `Slot` of the ring, or comes from memory: `load` returns
// the pack at an address. An empty Slot takes no room.

// y is stored: dy is the norm's gradient as it is.
struct StorePull {
    // Whether `values` are of a matrix.
    static constexpr bool READS_MORE = false;

    struct Slot {
        __device__ void start(const At&, int) {}
    };
    // What a pack needs of the piece's matrices, and the gradients of these matrices. FINDS: `find`
    // and `store` follow.
    struct Values {};

    template <bool FINDS>
    __device__ static Values values(const Slot&, const At&, int) { return {}; }
    template <bool FINDS, class Load>
    __device__ static Values values(const At&, const Load&) { return {}; }

    // Finds the piece's gradients from dy and the normalized and weighted value, to which no bias
    // is added and which is not rounded before the weight.
    __device__ static void find(Values&, int, float, float) {}
    __device__ static void store(const At&, int, const Values&) {}

    // The norm's gradient from dy.
    __device__ static float pull(const Values&, int, float dy) { return dy; }
};

// h is what forward has stored of x and the residual, and its gradient is that of both.
// dresidual_out is added to it.
struct SumPull {
    static constexpr bool READS_MORE = false;

    struct Slot {
#if HAS_DRESIDUAL_OUT
        Pack<R> dresidual_out[PACKS][THREADS];
#endif
        __device__ void start(const At& at, int k) {
#if HAS_DRESIDUAL_OUT
            start_copy(&dresidual_out[k][threadIdx.x], AT(dresidual_out), k, at.left);
#endif
        }
    };

    // What h needs besides x.
    struct Values {};

    __device__ static Values values(const Slot&, int) { return {}; }
    template <class Load>
    __device__ static Values values(const At&, const Load&) { return {}; }

    __device__ static void unpack_h(const Pack<R>& x, const Values&, float (&h)[PACK]) { unpack(x, h); }

    // Turns the gradient of h into that of x, of which there is a pack in the ring. Stores other
    // gradients of what made h.
    __device__ static void pull(const Slot& slot, const At&, int k, const Pack<R>&, float (&dx)[PACK]) {
#if HAS_DRESIDUAL_OUT
        add_pack(slot.dresidual_out[k][threadIdx.x], dx);
#endif
    }

    template <class Load>
    __device__ static void pull(const At& at, const Load& load, float (&dx)[PACK]) {
#if HAS_DRESIDUAL_OUT
        add_pack(load(AT(dresidual_out)), dx);
#endif
    }

    // dx is of T, in a cast of R.
    template <class E>
    __device__ static void store_dx(E* row, const At& at, int k, const float (&dx)[PACK]) {
        store_pack(row, k, at.left, pack<E>(dx));
    }

    __device__ static void store(const At& at, int k, const float (&dx)[PACK]) {
        store_dx(AT(dx), at, k, dx);
#if HAS_DRESIDUAL
        store_pack(AT(dresidual), k, at.left, pack<R>(dx));
#endif
    }
};
