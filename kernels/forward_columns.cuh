// Batches of packs of h, shared by both phases of forward on a rank's columns.

__device__ inline void load_packs(const Params& p, unsigned long long row, Visit at, Pack<H> (&h)[BATCH]) {
    #pragma unroll
    for (int k = 0; k < BATCH; ++k) {
        if (at.is_inside()) h[k] = load_h(p, row, at);
        at.advance();
    }
}

// Calls `use` for each pack of a batch, and returns the position after the batch.
template <class Use>
__device__ inline Visit use_packs(Visit at, const Pack<H> (&h)[BATCH], const Use& use) {
    #pragma unroll
    for (int k = 0; k < BATCH; ++k) {
        if (at.is_inside()) use(at, h[k]);
        at.advance();
    }
    return at;
}
