// A gate before or after the norm: math.md, equations (19) to (21). The activated gate is multiplied
// with x, and the product is not rounded, or with the norm's result.

// exp(-|z|), at most 1, so that nothing overflows. math.md, section 8, has its error. Results below
// 2^-126 are 0. Rows of f32 have the time for expf.
__device__ inline float falling_power(float z) {
    if constexpr (sizeof(T) == 4) return expf(-fabsf(z));
    constexpr float MINUS_LOG2_E = -1.44269504f;
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fabsf(z) * MINUS_LOG2_E));
    return power;
}

struct Sigmoids {
    // sigmoid(z) and sigmoid(-z), which is 1 - sigmoid(z) without its cancellation.
    float of, of_minus;

    __device__ explicit Sigmoids(float z) {
        const float power = falling_power(z);
        float larger;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(larger) : "f"(1.0f + power));
        const float smaller = power * larger;
        of = z < 0.0f ? smaller : larger;
        of_minus = z < 0.0f ? larger : smaller;
    }
};

struct Silu {
    __device__ static float value(float z) { return z * Sigmoids(z).of; }

    __device__ static float slope(float z) {
        const Sigmoids sigmoid(z);
        return sigmoid.of * (1.0f + z * sigmoid.of_minus);
    }
};

struct Sigmoid {
    __device__ static float value(float z) { return Sigmoids(z).of; }

    __device__ static float slope(float z) {
        const Sigmoids sigmoid(z);
        return sigmoid.of * sigmoid.of_minus;
    }
};

// Element i of a pack.
template <class E>
__device__ inline float element(const Pack<E>& pack, int i) {
    if constexpr (sizeof(E) == 4) return __uint_as_float(pack.words[i]);
    float low, high;
    split_word<E>(pack.words[i / 2], low, high);
    return i % 2 ? high : low;
}

// Products with the activated gate do not contract with a sum or a difference, so that a row has the
// same bits in every kernel.
template <class Activation, class E>
__device__ inline void multiply(float (&values)[PACK], const Pack<E>& gate) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) values[i] = __fmul_rn(values[i], Activation::value(element(gate, i)));
}

#if IS_BACKWARD

// A gate after the norm: dy times the activated gate is the norm's gradient.
template <class Activation>
struct GateAfterPull {
    static constexpr bool READS_MORE = true;

    struct Slot {
        Pack<T> gate[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&gate[k][threadIdx.x], AT(gate), k, at.left); }
    };

    struct Values {
        Pack<T> gate;
        Pack<W> bias;
        float dgate[PACK];
    };

    template <bool FINDS>
    __device__ static Values values(const Slot& slot, const At& at, int k) {
        return {slot.gate[k][threadIdx.x], load_parameter<FINDS && HAS_BIAS>(at.p.bias + group_column(at.p) + at.first, k, at.left), {}};
    }

    template <bool FINDS, class Load>
    __device__ static Values values(const At& at, const Load& load) {
        return {load(AT(gate)), load_parameter<FINDS && HAS_BIAS>(at.p.bias + group_column(at.p) + at.first, 0, at.left), {}};
    }

    __device__ static void find(Values& values, int i, float weighted, float dy) {
        const float normed = HAS_BIAS ? weighted + element(values.bias, i) : weighted;
        values.dgate[i] = dy * normed * Activation::slope(element(values.gate, i));
    }

    __device__ static void store(const At& at, int k, const Values& values) {
        if (at.p.dgate.data) store_pack(AT(dgate), k, at.left, pack<T>(values.dgate));
    }

    __device__ static float pull(const Values& values, int i, float dy) {
        return __fmul_rn(dy, Activation::value(element(values.gate, i)));
    }
};

// A gate before the norm: x times the activated gate is h.
template <class Activation>
struct GateBeforePull {
    static constexpr bool READS_MORE = true;

    struct Slot {
        Pack<T> gate[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&gate[k][threadIdx.x], AT(gate), k, at.left); }
    };

    using Values = Pack<T>;

    __device__ static Values values(const Slot& slot, int k) { return slot.gate[k][threadIdx.x]; }
    template <class Load>
    __device__ static Values values(const At& at, const Load& load) { return load(AT(gate)); }

    __device__ static void unpack_h(const Pack<R>& x, const Values& gate, float (&h)[PACK]) {
        unpack(x, h);
        multiply<Activation>(h, gate);
    }

    __device__ static void pull(const Slot& slot, const At& at, int k, const Pack<R>& x, float (&dx)[PACK]) {
        turn(at, k, x, slot.gate[k][threadIdx.x], dx);
    }

    template <class Load>
    __device__ static void pull(const At& at, const Load& load, float (&dx)[PACK]) {
        turn(at, 0, load(AT(x)), load(AT(gate)), dx);
    }

    __device__ static void store(const At& at, int k, const float (&dx)[PACK]) {
        store_pack(AT(dx), k, at.left, pack<T>(dx));
    }

private:
    __device__ static void turn(const At& at, int k, const Pack<R>& x, const Pack<T>& gate, float (&dx)[PACK]) {
        float dgate[PACK];
        #pragma unroll
        for (int i = 0; i < PACK; ++i) dgate[i] = dx[i] * element(x, i) * Activation::slope(element(gate, i));
        multiply<Activation>(dx, gate);
        if (at.p.dgate.data) store_pack(AT(dgate), k, at.left, pack<T>(dgate));
    }
};

#else

// After the norm.
template <class Activation>
struct GateAfter {
    static constexpr bool GOES_ON = false, IS_NORM = false;
    using Waiting = Pack<T>;

    template <Hint HINT>
    __device__ static Waiting load(const At& at, int k) { return load_pack<HINT>(AT(gate), k, at.left); }

    // CAST_BEFORE_WEIGHT: what is multiplied has been rounded to the wider of T and W.
    __device__ static void turn(float (&y)[PACK], const Waiting& gate) {
        if constexpr (CAST_BEFORE_WEIGHT && sizeof(W) == sizeof(T)) {
            #pragma unroll
            for (int i = 0; i < PACK; ++i) y[i] = to_f32(from_f32<T>(y[i]));
        }
        multiply<Activation>(y, gate);
    }

    __device__ static Waiting put(const At& at, int k, const float (&y)[PACK], const Waiting& gate) {
        float result[PACK];
        #pragma unroll
        for (int i = 0; i < PACK; ++i) result[i] = y[i];
        turn(result, gate);
        Store::put(at, k, result, {});
        return gate;
    }

    template <class Kept, class Run>
    __device__ static void then(Kept&&, const Run&) {}

    struct Slot {
        Pack<T> gate[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&gate[k][threadIdx.x], AT(gate), k, at.left); }
        __device__ void put(const At& at, int k, const float (&y)[PACK]) { GateAfter::put(at, k, y, gate[k][threadIdx.x]); }
    };
};

// Before the statistics. h has more digits than x, and is f32.
template <class Activation>
struct GateBefore {
    using Value = f32;
    using First = X;
    static constexpr bool IS_READ_ONCE = false;

    template <Hint HINT>
    __device__ static Pack<f32> load(const At& at, int k) { return add<HINT>(X::load<HINT>(at, k), at, k); }

    template <Hint HINT>
    __device__ static Pack<f32> add(const Pack<T>& x, const At& at, int k) { return add(x, load_addend<HINT>(at, k)); }

    using Addend = Pack<T>;

    template <Hint HINT>
    __device__ static Addend load_addend(const At& at, int k) { return load_pack<HINT>(AT(gate), k, at.left); }

    __device__ static Pack<f32> add(const Pack<T>& x, const Addend& gate) {
        float h[PACK];
        unpack(x, h);
        multiply<Activation>(h, gate);
        return pack<f32>(h);
    }

    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<f32> (&h)[PACKS]) {
        Pack<T> x[PACKS];
        Addend gates[PACKS];
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            x[k] = X::load<HINT>(at, k);
            gates[k] = load_addend<HINT>(at, k);
        }
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = add(x[k], gates[k]);
    }

    // h is not stored.
    __device__ static void store_h(const At&, int, const Pack<f32>&) {}
    __device__ static void store_h_row(const At&, const Pack<f32> (&)[PACKS]) {}

    struct Slot {
        // The words of h take the place of both once it is computed.
        Pack<T> x[PACKS][THREADS], gate[PACKS][THREADS];

        __device__ void start(const At& at, int k) {
            start_copy(&x[k][threadIdx.x], AT(x), k, at.left);
            start_copy(&gate[k][threadIdx.x], AT(gate), k, at.left);
        }

        __device__ void finish(const At&) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                const Pack<f32> h = add(x[k][threadIdx.x], gate[k][threadIdx.x]);
                #pragma unroll
                for (int i = 0; i < PACK; ++i) word(k, i) = h.words[i];
            }
        }

        __device__ Pack<f32> pack(int k) {
            Pack<f32> h;
            #pragma unroll
            for (int i = 0; i < PACK; ++i) h.words[i] = word(k, i);
            return h;
        }

    private:
        __device__ unsigned& word(int k, int i) {
            constexpr int WORDS = Pack<T>::BYTES / 4;
            return i < WORDS ? x[k][threadIdx.x].words[i] : gate[k][threadIdx.x].words[i - WORDS];
        }
    };
};

#endif
