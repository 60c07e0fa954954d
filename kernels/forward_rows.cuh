// Rows in the registers of a block, which may load them again from the L1. Shared by forward.cu and
// quantized_forward.cu.

// A thread's packs of UNROLL rows of its group.
using Parts = Pack<H>[UNROLL][PACKS];

// Stores residual_out, after the last load of the row: in place it overwrites x or the residual.
__device__ inline void store_residual_out(const Params& p, unsigned long long row, unsigned first, int k, int left, const Pack<H>& h) {
#if RESIDUAL_BEFORE
    if (p.residual_out.data) store_pack(ROW(residual_out, row) + first, k, left, h);
#endif
}

// Loads a pack of h, for the first or the last time. A held row is loaded once, but with the first
// load's hint, which is faster (docs/internals/tried.md).
template <bool IS_LAST>
__device__ inline Pack<H> load_h(const Params& p, unsigned long long row, unsigned first, int k, int left) {
    constexpr Reuse REUSE = IS_LAST ? Reuse::ByNone : Reuse::ByThread;
#if HAS_PARTS
    Pack<R> h;
    add_parts<REUSE, 1>(p, row, first, k, left, &h);
    return h;
#else
    const Pack<T> x = load_pack<REUSE>(ROW(x, row) + first, k, left);
#if RESIDUAL_BEFORE
    const Pack<R> h = add_residual(x, load_pack<REUSE>(ROW(residual, row) + first, k, left));
    if constexpr (IS_LAST) store_residual_out(p, row, first, k, left, h);
    return h;
#else
    return x;
#endif
#endif
}
