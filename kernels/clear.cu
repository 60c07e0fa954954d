// Zeroes p.cols bytes at p.y.data: accumulators, locks or gaps of the next kernel's outputs. The
// driver's memset takes 1 us more, because no kernel may overlap it.

constexpr int PIECE = 16;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) clear(const __grid_constant__ Params p) {
    admit_next_kernel();
    wait_for_earlier_kernels();
    char* const start = reinterpret_cast<char*>(p.y.data);
    const bool is_aligned = reinterpret_cast<unsigned long long>(start) % PIECE == 0;
    for (unsigned long long first = (blockIdx.x * THREADS + threadIdx.x) * (unsigned long long)PIECE; first < p.cols;
         first += gridDim.x * (unsigned long long)(THREADS * PIECE)) {
        if (is_aligned && first + PIECE <= p.cols) {
            *reinterpret_cast<uint4*>(start + first) = uint4{};
        } else {
            for (int i = 0; i < PIECE; i++) {
                if (first + i < p.cols) start[first + i] = 0;
            }
        }
    }
}
