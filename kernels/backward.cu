// Backward: math.md, equations (7) to (12). A block, or a cluster of blocks, has a chunk of rows
// and computes one partial row of dweight and dbias from it.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward(const __grid_constant__ Params p) {
    // Aligned to 128 bytes: a line that cp.async copies is then one line of shared memory, which
    // takes half as long as two.
    extern __shared__ __align__(128) char shared[];
    run_rows(p, shared);
}
