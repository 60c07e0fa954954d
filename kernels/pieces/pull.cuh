// What pieces do in backward. What follows the norm in forward turns dy before the sums over the row
// (`AfterPull`); what comes before it turns dx at the end (`BeforePull`).

// y is stored: dy is the norm's gradient as it is, and no matrix waits in the ring.
struct AfterPull {
    struct Slot {
        __device__ void start(const At&, int) {}
    };
    struct Values {};

    __device__ static Values values(const Slot&, int) { return {}; }
    // dy of the norm from dy, given the normalized and weighted value.
    __device__ static void pull(const Values&, int, float, float&) {}
};

// The gradient of h is that of x and of the residual. dresidual_out is added to it.
struct BeforePull {
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

    __device__ static void add(const Pack<R>& gradient, float (&dx)[PACK]) {
        float addend[PACK];
        unpack(gradient, addend);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) dx[i] += addend[i];
    }

    __device__ static void pull(const Slot& slot, int k, float (&dx)[PACK]) {
#if HAS_DRESIDUAL_OUT
        add(slot.dresidual_out[k][threadIdx.x], dx);
#endif
    }

    // The same where nothing waits in a ring.
    __device__ static void pull(const At& at, int k, float (&dx)[PACK]) {
#if HAS_DRESIDUAL_OUT
        add(load_pack<Hint::EvictFirst>(AT(dresidual_out), k, at.left), dx);
#endif
    }

    __device__ static void store(const At& at, int k, const float (&dx)[PACK]) {
        store_pack(AT(dx), k, at.left, pack<T>(dx));
#if HAS_DRESIDUAL
        store_pack(AT(dresidual), k, at.left, pack<R>(dx));
#endif
    }
};
