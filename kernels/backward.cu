// Backward: math.md, equations (7) to (12). A block, or a cluster of them, has a chunk of rows, and makes a partial row of dweight
// and dbias of it.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward(const __grid_constant__ Params p) {
    // Where a thread's line begins within it, it begins in memory: copies of split lines take twice as long.
    extern __shared__ __align__(128) char shared[];
    run_rows(p, shared);
}
