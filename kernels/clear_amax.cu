// Zeroes the cell of the largest magnitude, for the kernel behind it, which folds into it. A memset by the driver takes longer than all
// of a decode step: no kernel may overlap it.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) clear_amax(const __grid_constant__ Params p) {
    admit_next_kernel();
    wait_for_earlier_kernels();
    if (threadIdx.x > 0) return;
    if constexpr (SCALE == FIND) {
        p.found[0] = 0;
        p.found[1] = 0;
    } else {
        *p.amax = 0.0f;
    }
}
